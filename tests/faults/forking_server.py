"""`sglang.launch_server`, whose processes are forked: each would spend the time of its start on the imports again.

python tests/faults/forking_server.py ARGUMENTS OF sglang.launch_server
"""

import multiprocessing
import runpy

if __name__ == "__main__":
    multiprocessing.Process = multiprocessing.get_context("fork").Process  # type: ignore[misc]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
