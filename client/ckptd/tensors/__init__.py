"""Live objects to captured values and back: the only place that touches torch and numpy, with `ckptd.loop`."""

# Whatever of this package is used first, a torch that is too old is refused before anything is read or written.
import ckptd.tensors.torch_support  # noqa: F401 - imported for its check
