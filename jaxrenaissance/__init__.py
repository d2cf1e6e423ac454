"""All of a model's parameters updated in a constant number of kernel launches."""

from .accumulation import Accumulate as Accumulate
from .check import check as check
from .gradients import Gradients as Gradients
from .groups import Group as Group
from .lerp import lerp as lerp
from .loss_scale import DynamicLossScale as DynamicLossScale
from .loss_scale import StaticLossScale as StaticLossScale
from .native import BackendUnavailable as BackendUnavailable
from .optax_in import from_optax as from_optax
from .optax_out import to_optax as to_optax
from .optimizers import adam as adam
from .optimizers import adamw as adamw
from .optimizers import lamb as lamb
from .optimizers import lars as lars
from .optimizers import lion as lion
from .optimizers import sgd as sgd
from .packed import Packed as Packed
from .plan import MemoryPlan as MemoryPlan
from .plan import PlanConfig as PlanConfig
from .regions import BIAS_LIKE as BIAS_LIKE
from .regions import WEIGHTS as WEIGHTS
from .regions import MemRange as MemRange
from .regions import Region as Region
from .train_state import TrainState as TrainState
from .transform import Optimizer as Optimizer
