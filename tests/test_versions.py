"""The package follows torch's own names: importing and using it logs nothing on any supported torch."""

import subprocess
import sys


def test_import_and_use_log_no_deprecation_of_torch():
    code = (
        "import weakref_ext as w\n"
        "assert w.weak_ref_tensors([w.LayerName('x')]) == [w.LayerName('x')]\n"
        "try: w.weak_ref_tensors([None])\n"
        "except ValueError: pass\n"
    )
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
