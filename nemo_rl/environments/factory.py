"""From `env.*` and `data.*` to the environment that scores."""

from nemo_rl.config.schema import DataConfig, EnvConfig, ReasoningGymDataConfig
from nemo_rl.data.reasoning_gym_data import make_task
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.environments.reasoning_gym_environment import ReasoningGymEnvironment


def make_environment(env: EnvConfig, data: DataConfig) -> EnvironmentInterface:
    """reasoning-gym problems are scored by their task, everything else by `env.math.verifier`."""
    if isinstance(data, ReasoningGymDataConfig):
        return ReasoningGymEnvironment(make_task(data))
    return MathEnvironment(env.math.verifier)
