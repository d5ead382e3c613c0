"""The worker of an engine, with a little engine in the place of SGLang's server. Everything else is the real thing."""

import os
import sys
from pathlib import Path

from nemo_rl.models.generation.sglang.server_process import ServerProcess
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker

SCRIPT = Path(__file__).with_name("little_engine.py")


class LittleWorker(SGLangGenerationWorker):
    def _launch(self, port: int, internal_port: int) -> ServerProcess:
        if Path(self._model_folder, "broken").exists():
            command = [sys.executable, "-c", "raise SystemExit('this engine does not start')"]
        else:
            command = [sys.executable, str(SCRIPT), self._host, str(port)]
        self._process = ServerProcess(command, os.environ, self._log_file, self._host, port, self._keys)
        return self._process
