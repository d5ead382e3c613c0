"""A dispatcher over servers at fixed addresses, for tests of the sampler alone."""

from collections.abc import Sequence

from nemo_rl.models.generation.interfaces import EnginesLostError
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.sampler import Dispatcher, Endpoint


class FixedEngines(Dispatcher):
    """Request i goes to engine `i + attempt`; each report is recorded, and may take an engine out."""

    def __init__(self, urls: Sequence[str], *, gone: Sequence[str] = ()) -> None:
        """`gone`: URLs that the first report finds dead."""
        self.alive = {f"engine {index} at {url}": url for index, url in enumerate(urls)}
        self.gone = set(gone)
        self.reports: list[tuple[str, int, int | None]] = []

    @property
    def num_engines(self) -> int:
        return len(self._alive())

    def choose(self, index: int, attempt: int) -> Endpoint:
        engines = list(self._alive().items())
        return Endpoint(*engines[(index + attempt) % len(engines)])

    def report(self, endpoint: Endpoint, attempt: int, error: EngineError) -> None:
        self.reports.append((endpoint.name, attempt, error.status))
        self.alive = {name: url for name, url in self.alive.items() if url not in self.gone}
        self._alive()

    def _alive(self) -> dict[str, str]:
        if not self.alive:
            raise EnginesLostError({"all": "gone"})
        return self.alive
