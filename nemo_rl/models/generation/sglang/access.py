"""The keys of a run: who lacks them gets nothing out of its engines and nothing into them."""

import re
import secrets
from dataclasses import dataclass, field

_NUM_KEY_BYTES = 32
_KEY = re.compile(f"[0-9a-f]{{{2 * _NUM_KEY_BYTES}}}")
ADMIN_ENDPOINTS = frozenset(
    {
        "/abort_request",
        "/begin_weight_update",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/flush_cache",
        "/init_weights_update_group",
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/weights_checker",
    }
)
"""Those that the program calls and that open only to the administrative key, once a server has both."""


def is_admin_endpoint(endpoint: str) -> bool:
    """Whether a call to `endpoint`, such as `/flush_cache`, needs the administrative key."""
    return endpoint in ADMIN_ENDPOINTS


@dataclass(frozen=True)
class AccessKeys:
    """Two random keys, made once per run. They never go on a command line, into an environment or into a log."""

    api_key: str = field(repr=False)
    """Opens generation and what a server says about itself."""
    admin_api_key: str = field(repr=False)
    """Opens what changes a server: weights, pause, cache."""

    def __post_init__(self) -> None:
        """Raises ValueError for keys that a log could not be cleaned of; they are 64 hexadecimal digits each."""
        if not (_KEY.fullmatch(self.api_key) and _KEY.fullmatch(self.admin_api_key)):
            raise ValueError(f"access keys: got another form; expected {2 * _NUM_KEY_BYTES} hexadecimal digits each")

    @classmethod
    def make(cls) -> "AccessKeys":
        return cls(api_key=secrets.token_hex(_NUM_KEY_BYTES), admin_api_key=secrets.token_hex(_NUM_KEY_BYTES))

    def options(self) -> dict[str, str]:
        """As a server reads them from the file that it is given."""
        return {"api-key": self.api_key, "admin-api-key": self.admin_api_key}

    def headers(self, admin: bool) -> dict[str, str]:
        """HTTP headers of a call to an administrative endpoint (`admin`), or to any other."""
        key = self.admin_api_key if admin else self.api_key
        return {"Authorization": f"Bearer {key}"}
