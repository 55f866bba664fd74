"""From a failure that was seen to the node where it begins."""

from __future__ import annotations

from caracal_runtimes.bisect.endings import Endings
from caracal_runtimes.bisect.findings import Finding
from caracal_runtimes.bisect.scene import Scene
from caracal_runtimes.bisect.wrong_values import WrongValues


def locate(scene: Scene) -> Finding:
    """The first node that shows a scene's failure. Raises NotReproducedError."""
    if scene.failure in ("numbers", "nan", "shape"):
        return WrongValues(scene).locate()
    return Endings(scene).locate()
