"""A GPU that is emulated: kernels compiled as C++ (`compiling`) run over arrays of numpy (`device`, `libraries`)."""

from tests.support.emulator.compiling import compiler, needs_compiler
from tests.support.emulator.device import EMULATED_GPU, SMALL_GPU, EmulatedDevice, EmulatedEvent

__all__ = ["EMULATED_GPU", "SMALL_GPU", "EmulatedDevice", "EmulatedEvent", "compiler", "needs_compiler"]
