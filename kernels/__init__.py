"""Methods to compute one layer: the contract, the table of primitives and the float64 reference."""

if __name__ != "znnpy.kernels":
    raise ImportError(f"this folder is znnpy.kernels, not {__name__}; import znnpy.kernels")
