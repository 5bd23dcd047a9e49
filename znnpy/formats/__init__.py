"""Reading and checking what came from outside: networks and weights. The only place that flips kernels."""
