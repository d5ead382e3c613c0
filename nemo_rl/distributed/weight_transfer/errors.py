"""How a refit fails."""


class TransferError(RuntimeError):
    """A refit that failed: which engine, which bucket or tensor, its own words."""


class ManifestError(TransferError):
    """What is sent differs from what was planned: names the tensors."""
