"""GRPO post-training: FSDP2 policy, SGLang generation on its own devices, weights by broadcast."""

import os

# Ray reads this at import. Under `uv run` it would otherwise rebuild the environment in every worker.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
