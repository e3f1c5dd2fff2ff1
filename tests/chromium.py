"""Find a Chromium or Chrome to drive. As a program: print its path, or exit with 1.

MINILLM_CHROMIUM names one; "none" means: act as if there were none.
"""

import os
import shutil
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
)


def find() -> str | None:
    named = os.environ.get("MINILLM_CHROMIUM")
    for name in [named] if named else [*NAMES, *PLACES]:
        if path := shutil.which(name):
            return path
    return None


if __name__ == "__main__":
    path = find()
    print(path or "no Chromium or Chrome found")
    sys.exit(path is None)
