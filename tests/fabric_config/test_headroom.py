import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.fabric.config.asic import ASICS, PAUSE_QUANTA
from bywash.fabric.config.compare import compare
from bywash.fabric.config.headroom import cable_bytes, formula, lua, read_lookup
from tests.fabric_config.samples import DATA, needs_table

TABLE = DATA / "pg_profile_lookup.csv"


@needs_table
def test_the_formula_gives_every_xoff_of_four_switches():
    table = read_lookup(TABLE)
    rows = [(asic, row) for asic in ASICS.values() for row in table.rows if row.sku == asic.hwsku]
    assert len(rows) == 78
    wrong = [row for asic, row in rows if formula(asic, row.gbps, row.cable_m).xoff_bytes != row.headroom.xoff_bytes]
    assert wrong == []


@needs_table
def test_the_other_figures_deviate_by_one_kib_in_four_known_rows():
    counts, deviations = compare(read_lookup(TABLE))
    assert [(one.rows, one.xoff, one.size, one.xon) for one in counts] == [
        (15, 15, 15, 15),
        (18, 18, 18, 18),
        (21, 21, 21, 21),
        (24, 24, 22, 21),
    ]
    assert {(one.row.gbps, one.row.cable_m, one.field) for one in deviations} == {
        (40, 5, "size"),
        (800, 5, "xon"),
        (800, 40, "xon"),
        (800, 40, "size"),
        (800, 300, "xon"),
    }
    assert {abs(one.table_bytes - one.formula_bytes) for one in deviations} == {1024}


@needs_table
def test_todays_dynamic_model_agrees_on_one_switch_only():
    counts, _ = compare(read_lookup(TABLE))
    assert [one.dynamic_xoff for one in counts] == [1, 0, 0, 24]


def test_both_models_for_400_gbps_and_40_m_on_an_sn4700():
    assert formula(ASICS["sn4700"], 400, 40).xoff_bytes == 77_824
    assert lua(ASICS["sn4700"], 400, 40).xoff_bytes == 266_240


@needs_table
def test_rows_of_other_asics_are_looked_up_never_computed():
    table = read_lookup(TABLE)
    row = next(row for row in table.rows if row.sku == "Accton-AS7116-54X-R0" and (row.gbps, row.cable_m) == (100, 40))
    found = table.find("Accton-AS7116-54X-R0", 100, 31)
    assert found is row.headroom
    assert (found.size_bytes, found.xon_bytes, found.xoff_bytes) == (3584, 78_400, 132_160)


@given(asic=st.sampled_from(list(ASICS.values())), data=st.data())
def test_headroom_grows_with_cable_and_speed_and_covers_the_cable(asic, data):
    speeds = [speed for speed in PAUSE_QUANTA if speed <= asic.max_gbps]
    gbps = data.draw(st.sampled_from(speeds))
    cable = data.draw(st.floats(0, 2000))
    here = formula(asic, gbps, cable)
    assert here.xoff_bytes >= cable_bytes(gbps, cable) + 9216
    assert here.xoff_bytes % 1024 == here.size_bytes % 1024 == 0
    assert formula(asic, gbps, cable + 50).xoff_bytes >= here.xoff_bytes
    faster = [speed for speed in speeds if speed > gbps]
    if faster:
        assert formula(asic, faster[0], cable).xoff_bytes >= here.xoff_bytes
    assert lua(asic, gbps, cable).xoff_bytes >= here.xoff_bytes or asic.name == "sn2700"


def test_a_table_as_sonic_writes_it(tmp_path):
    ini = tmp_path / "pg_profile_lookup.ini"
    ini.write_text("# speed cable size xon xoff threshold xon_offset\n\n100000 40m 1248 2288 177632 -3 2288\n")
    found = read_lookup(ini).find("any", 100, 12)
    assert (found.size_bytes, found.xon_bytes, found.xoff_bytes, found.xon_offset_bytes) == (1248, 2288, 177_632, 2288)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        ("100000 40m 1248", "line 1"),
        ("fast 40m 1 2 3 0", "line 1"),
        ("sku,speed_mbps,cable_m,size_bytes,xon_bytes,xoff_bytes\nx,100000,40,1,2,many\n", "line 2"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(tmp_path, text, message):
    file = tmp_path / "table"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_lookup(file)


@pytest.mark.parametrize(("gbps", "cable"), [(800, 5), (33, 5), (100, -1), (100, float("nan"))])
def test_ports_and_cables_that_do_not_exist_are_refused(gbps, cable):
    with pytest.raises(ConfigError):
        formula(ASICS["sn4700"], gbps, cable)


def test_an_asic_without_a_formula_says_what_to_give():
    unknown = dataclasses.replace(ASICS["sn4700"], cell_bytes=0)
    with pytest.raises(ConfigError, match="--pg-lookup"):
        formula(unknown, 100, 5)


@needs_table
def test_a_cable_longer_than_the_table_is_refused():
    with pytest.raises(ConfigError, match="ends at 300 m"):
        read_lookup(TABLE).find("ACS-SN5600", 400, 301)
