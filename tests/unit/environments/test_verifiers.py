import pytest

from nemo_rl.config.schema import ArithmeticDataConfig, EnvConfig, MathEnvConfig
from nemo_rl.environments.factory import make_environment
from nemo_rl.environments.reasoning_gym_environment import extract_answer
from nemo_rl.environments.verifiers import last_integer, math_verify

DATA = ArithmeticDataConfig(dataset_name="arithmetic")


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("37", "37"),
        ("The answer is 37.", "37"),
        ("= -37.\n", "-37"),
        ("23 - 60 = \u221237", "-37"),
        ("23-60=-37", "-37"),
        ("(-37)", "-37"),
        ("-0", "0"),
        ("007", "7"),
        ("1,234", "1234"),
        ("-1,234,567", "-1234567"),
        ("1, 2, 3", "3"),
        ("12,3456", "3456"),
        ("37.0", "37"),
        ("37.00 apples", "37"),
        ("5-3", "3"),
        ("5 - 3", "3"),
        ("$\\boxed{37}$", "37"),
        ("37%", "37"),
        ("first 5, then 37", "37"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_last_integer_found(response: str, number: str) -> None:
    assert last_integer(response, number)
    assert not last_integer(response, "1" + number.lstrip("-"))


@pytest.mark.parametrize("response", ["", "none", "37.5", "it was 37, or 3.25", "thirty-seven", "-", "٣"])
def test_no_last_integer(response: str) -> None:
    assert not any(last_integer(response, number) for number in ("37", "5", "25", "3", "0"))


def test_sign_matters() -> None:
    assert not last_integer("37", "-37")
    assert not last_integer("-37", "37")


@pytest.mark.parametrize("reference", ["", "x", "3.5", "1/2"])
def test_reference_must_be_an_integer(reference: str) -> None:
    with pytest.raises(ValueError, match="env.math.verifier: 'last_integer' needs integer references"):
        last_integer("3", reference)
    with pytest.raises(ValueError, match="env.math.verifier"):
        make_environment(EnvConfig(), DATA).check_references(["1", reference])


@pytest.mark.parametrize(
    ("response", "reference", "right"),
    [
        ("The answer is $\\frac{1}{2}$.", "0.5", True),
        ("so \\boxed{37}", "37", True),
        ("37", "$37$", True),
        ("38", "37", False),
        ("", "37", False),
        ("$\\frac{1}{$", "37", False),
        ("$x + 1$", "1 + x", True),
    ],
)
def test_math_verify(response: str, reference: str, right: bool) -> None:
    assert math_verify(response, reference) is right


def test_environment_scores_in_order() -> None:
    environment = make_environment(EnvConfig(), DATA)
    environment.check_references(["3", "-4", "+5"])
    assert environment.score(["3", "4", "it is 5"], ["3", "-4", "+5"]) == [1.0, 0.0, 1.0]
    by_math = make_environment(EnvConfig(math=MathEnvConfig(verifier="math_verify")), DATA)
    by_math.check_references(["x"])
    assert by_math.score(["$\\frac{2}{4}$", "2"], ["0.5", "3"]) == [1.0, 0.0]


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="longer than argument"):
        make_environment(EnvConfig(), DATA).score(["3"], ["3", "4"])


def test_extract_answer() -> None:
    assert extract_answer("a <answer> 1 </answer> b <answer>2\n</answer>") == "2"
    assert extract_answer("  42 \n") == "42"
