"""GRPO from a YAML config: `uv run examples/run_grpo.py --config examples/configs/grpo_sglang_broadcast_cpu.yaml`."""

import sys

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import exit_with_refusal, load_config_or_exit


def main() -> None:
    config = load_config_or_exit(sys.argv[1:], program="run_grpo.py")
    from nemo_rl.data.datasets import load_problems
    from nemo_rl.models.model_source import find_folder

    try:
        find_folder(config.policy.model_name)
        problems = load_problems(config.data)
    except ValueError as error:
        exit_with_refusal(error)
    # torch, ray and sglang are imported only when config and data files are right.
    from nemo_rl.run import RUN_FAILURES, run_grpo
    from nemo_rl.setup import prepare_inputs
    from nemo_rl.utils.log import configure_logging

    configure_logging()
    try:
        inputs = prepare_inputs(config, problems)
    except ValueError as error:
        exit_with_refusal(error)
    try:
        run_grpo(config, inputs)
    except ConfigError as error:
        exit_with_refusal(error)
    except RUN_FAILURES as error:
        raise SystemExit(f"run_grpo.py: the run has ended: {error}") from None


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.stderr.write("run_grpo.py: interrupted: what it had started has been ended\n")
        raise SystemExit(130) from None
