"""Where a provider leaves the reference: the first node that is wrong, crashes, hangs, does not load or runs elsewhere.

`run_bisect` is the whole of it; `layer_errors` and `layer_svg` show the error across the blocks. Cutting graphs needs the
package `onnx`, which is imported where it is used only.
"""

from __future__ import annotations

from caracal_runtimes.bisect.findings import BisectReport, Finding
from caracal_runtimes.bisect.layers import LayerError, layer_errors
from caracal_runtimes.bisect.picture import layer_svg
from caracal_runtimes.bisect.run import Options, run_bisect

__all__ = ["BisectReport", "Finding", "LayerError", "Options", "layer_errors", "layer_svg", "run_bisect"]
