"""A pytest plugin for `minillm grade`: writes what became of each cell, and notices at once when a kernel dies.

nbval alone would wait for a dead kernel's answer until the cell's time limit. All chapters.
"""

import json
import os
import re
import time
from queue import Empty

from nbval.kernel import RunningKernel


class KernelDied(RuntimeError):
    """The process that ran the cell is gone."""


def pytest_configure(config):
    plain_wait = RunningKernel.await_reply

    def await_reply(self, msg_id, timeout=None):
        end = time.monotonic() + (timeout or 3600)
        while True:
            try:
                return plain_wait(self, msg_id, timeout=1.0)
            except Empty:
                if not self.is_alive():
                    raise KernelDied("the kernel died") from None
                if time.monotonic() > end:
                    raise

    RunningKernel.await_reply = await_reply


def pytest_runtest_logreport(report):
    """One line a cell: its number among the code cells, passed or not, and the error."""
    if report.when == "call" or (report.when == "setup" and report.failed):
        text = re.sub(r"\x1b\[[0-9;]*m", "", report.longreprtext) if report.failed else ""
        row = {"cell": int(report.nodeid.rsplit(" ", 1)[-1]), "failed": report.failed, "text": text}
        with open(os.environ["MINILLM_GRADE_CELLS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
