"""How benchmarks/profile_train.py adds up what a profiler saw."""

import pytest
from scripts import ROOT


@pytest.fixture
def profile_train(monkeypatch):
    pytest.importorskip("flax")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import profile_train

    return profile_train


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "void jaxrenaissance::(anonymous namespace)::UpdateKernel<float>",
            "Update",
        ),
        (
            "_ZN14jaxrenaissance12_GLOBAL__N_117UpdateNormsKernelIfEEvPKT_",
            "UpdateNorms",
        ),
        ("sm90_xmma_fprop_implicit_gemm", "others"),
        ("MemcpyD2D", "others"),
    ],
)
def test_kernels_go_by_their_names(profile_train, name, wanted):
    assert profile_train.kind(name) == wanted


def test_times_are_of_what_is_covered(profile_train):
    event = profile_train.Event
    update, unpack = "jaxrenaissance::UpdateKernel<>", "jaxrenaissance::UnpackKernel<>"
    events = [
        event("gemm", 2_000, 6_000),
        event(unpack, 0, 1_000),
        event(update, 5_000, 9_000),
        event("gemm", 3_000, 4_000),  # beside the other
        event(unpack, 12_000, 14_000),
    ]
    rows = {row["kernel"]: row for row in profile_train.rows_of(events, 2)}
    assert rows["Unpack"] == pytest.approx(
        {"kernel": "Unpack", "a_step": 1, "us": 1.5, "alone_us": 1.5, "of_the_busy_time": 0.3}
    )
    assert rows["Update"]["us"], rows["Update"]["alone_us"] == (2, 1.5)
    assert rows["others"]["us"], rows["others"]["alone_us"] == (2, 1.5)
    assert rows["ours, in all"]["us"] == 3.5
    assert rows["idle"]["us"] == 2
