"""The refit against the raw broadcast and the usual path, on real engines, and the proof that what arrived is exact.

    uv run benchmarks/refit.py --preset 135m --output logs/refit
    uv run benchmarks/refit.py --config my.yaml --output logs/refit [key=value ...]

In one run, each figure a median of five: (a) one raw broadcast of as many bytes over the weight-update group; (b) the usual
path: a gather to all ranks and a broadcast per tensor, an announcement per bucket, one thing after the other; (c) this
path at several bucket sizes; (d) the gathers alone; (e) the engine alone: told, loading, answering, without (a). (b) and
(c) are whole refits as the loop makes them, from the pause to the resume, without the proof. On GPUs, also the memory that
a refit takes on each rank. Bytes and tensors are those of every refit but the first: with LoRA or a frozen vision tower
what training changes. Then these weights are moved, sent, and every checksum of the engines is compared with those after a
load of the trainer's exported folder; exit code 1 when one differs or none has moved. Writes a table, refit.json,
refit.png and trace.json.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from preset_shapes import PRESETS

from nemo_rl.config.loader import exit_with_refusal, load_config_or_exit

ROOT = Path(__file__).parents[1]
PROGRAM = "benchmarks/refit.py"
PRESET_OVERRIDES = [
    "policy.precision=bfloat16",
    "policy.max_total_sequence_length=128",
    "policy.generation.max_new_tokens=16",
    "refit.verify=off",
]


def main() -> None:
    arguments = parse_arguments()
    load_config(arguments, Path("not yet written"))
    # torch, ray and sglang are imported for a valid config only.
    from presets import write_model
    from refit_bench import run_bench
    from report import unproven, write_report

    from nemo_rl.setup import prepare_inputs
    from nemo_rl.utils.log import configure_logging

    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.output, prefix="model-") as scratch:
        config = load_config(arguments, Path(scratch))
        if arguments.preset is not None:
            write_model(arguments.preset, Path(scratch))
        configure_logging()
        try:
            inputs = prepare_inputs(config)
        except ValueError as error:
            exit_with_refusal(error)
        report = {"preset": arguments.preset or config.policy.model_name} | run_bench(config, inputs, arguments.repeats)
    write_report(report, arguments.output)
    if problem := unproven(report["proof"]):
        raise SystemExit(f"{PROGRAM}: NOT PROVEN: {problem}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the refit.", epilog="more: docs/performance.md")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", choices=sorted(PRESETS), help="random weights of a known shape")
    what.add_argument("--config", type=Path, help="any config of a run")
    parser.add_argument("--output", type=Path, required=True, help="folder for refit.json, refit.png and trace.json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    return parser.parse_intermixed_args()


def load_config(arguments: argparse.Namespace, model: Path) -> Any:
    """`model`: folder of a preset's weights, which need not be there yet."""
    overrides = [f"logger.log_dir={arguments.output / 'run'}", *arguments.overrides]
    if arguments.config is not None:
        base = arguments.config
    else:
        base = ROOT / "examples/configs/grpo_tiny_cpu.yaml"
        overrides = [f"policy.model_name='{model}'", *PRESET_OVERRIDES, *overrides]
    return load_config_or_exit(["--config", str(base), *overrides], program=PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
