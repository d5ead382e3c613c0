"""The router's process: sglang-router's own server, with keys that stand on no command line.

    python -m nemo_rl.models.generation.sglang.router_process SETTINGS --config KEYS

SETTINGS is JSON, fields of `sglang_router.router_args.RouterArgs`. KEYS is a file with `api-key` and `admin-api-key`,
made by the supervisor; sglang-router's own launcher takes keys as arguments only, which every user of the machine sees.
"""

import json
import sys
from pathlib import Path

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs


def main(arguments: list[str]) -> None:
    """Serve until a signal comes."""
    settings_text, option, key_file = arguments
    if option != "--config":
        raise ValueError(f"got {option!r}; expected SETTINGS --config KEYS")
    keys = json.loads(Path(key_file).read_text())
    arguments_of_router = RouterArgs(
        **json.loads(settings_text),
        api_key=keys["api-key"],
        # (id, name, key, role): opens the list of workers, which `api_key` then does not.
        control_plane_api_keys=[("driver", "driver", keys["admin-api-key"], "admin")],
    )
    Router.from_args(arguments_of_router).start()


if __name__ == "__main__":
    main(sys.argv[1:])
