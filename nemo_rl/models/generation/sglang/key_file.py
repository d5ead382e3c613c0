"""A file that hands keys to one reader and holds nothing on disk."""

import errno
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType


class KeyFile(AbstractContextManager["KeyFile"]):
    """A named pipe that only this user can open. It looks like a YAML file, and is gone as soon as it is read."""

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        """Make the file.

        Args:
            folder: only this user may enter it.
            options: what the file says, at most 4 KiB in all.
        """
        # JSON is YAML, and its quotes keep a key of digits a string.
        self._text = json.dumps(options).encode()
        self.path = folder / "keys.yaml"
        os.mkfifo(self.path, 0o600)
        self._exists = True

    def hand_over(self) -> None:
        """Write the keys if the reader is there, and delete the file then; never waits."""
        if not self._exists:
            return
        try:
            pipe = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            # Nobody has opened it to read yet.
            return
        try:
            # An empty pipe takes this much at once.
            os.write(pipe, self._text)
        except BrokenPipeError:
            # The reader has gone without reading; another may come.
            return
        finally:
            os.close(pipe)
        self.delete()

    def delete(self) -> None:
        """Idempotent."""
        self.path.unlink(missing_ok=True)
        self._exists = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete()
