"""The compiled modules: the only place that loads them and registers their FFI targets.

Nothing is loaded on import, so that importing never fails and never warns.
"""

from .backends import DISABLE as DISABLE
from .backends import available as available
from .backends import build_info as build_info
from .backends import cuda_devices as cuda_devices
from .backends import cuda_executions as cuda_executions
from .backends import disabled as disabled
from .backends import require as require
from .backends import scalar_slots as scalar_slots
from .backends import warn_fallback_once as warn_fallback_once
from .backends import why_not as why_not
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
from .errors import BackendUnavailable as BackendUnavailable
from .sources import build_record as build_record
