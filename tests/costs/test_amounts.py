"""Amounts of memory as they are typed; errors are tested with the commands that read them."""

from penstock.costs.amounts import to_amount


def test_unit_is_a_power_of_1000_or_with_an_i_of_1024() -> None:
    amounts = {"4": 4, "4b": 4, "1.5KB": 1500, "1.5 KiB": 1536, "2mib": 2 * 1024**2, "1TB": 10**12}
    assert amounts == {text: to_amount("--memory", text) for text in amounts}
