import pytest

from jaxrenaissance.regions import BIAS_LIKE, W_REGIONS, WEIGHTS, MemRange, Region


def test_the_two_groups_are_consecutive_and_meet():
    assert [int(region) for region in BIAS_LIKE + WEIGHTS] == list(range(6))
    assert W_REGIONS == BIAS_LIKE + WEIGHTS


def test_every_series_repeats_the_meanings_of_w():
    for k, series in enumerate("WGMV"):
        for region in W_REGIONS:
            same = Region(6 * k + region)
            assert same.name == series + region.name[1:]
            assert same.series == series
            assert same.base is region


def test_numbers_are_fixed():
    assert (Region.N, Region.S_SCALAR_FP32, Region.S_SCALAR_INT32) == (24, 25, 26)
    assert len(Region) == 27
    assert (Region.N.series, Region.S_SCALAR_FP32.series) == ("N", "S")


@pytest.mark.parametrize("region", [Region.N, Region.S_SCALAR_FP32, Region.S_SCALAR_INT32])
def test_regions_without_leaves_have_no_base(region):
    with pytest.raises(ValueError, match=region.name):
        _ = region.base


def test_mem_range_is_offset_and_size():
    assert MemRange(3, 4) == (3, 4)
    assert MemRange(offset=3, size=4).size == 4
