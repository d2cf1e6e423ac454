"""The errors of a native backend that does not work."""


class BackendUnavailable(RuntimeError):
    """A native backend does not work here.

    Attributes:
        platform: "cpu" or "cuda".
        reason: why it does not work.
        remedy: what mends it, mostly a command.
    """

    def __init__(self, platform: str, reason: str, remedy: str) -> None:
        super().__init__(platform, reason, remedy)
        self.platform = platform
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return (
            f"the native {self.platform} backend does not work here: {self.reason}. "
            f"To mend it: {self.remedy}"
        )


class NotBuilt(BackendUnavailable):
    """No module was built for the backend; the build said so."""
