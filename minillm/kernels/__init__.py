"""Triton kernels and their torch twins. Chapters 08 to 10.

Python runs this file before any module of the package, so the choice between a GPU and Triton's interpreter is made
here, before the first `import triton`. A module that defines kernels imports triton at its top and is itself imported
only inside functions; `launch`, `attention` and the `*_reference` twins never need triton.
"""

from minillm.kernels.launch import choose_interpreter

choose_interpreter()
