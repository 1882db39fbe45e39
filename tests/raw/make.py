"""Writes criteo.txt and avazu.csv beside itself: made lines of the form of the real files, the same every time."""

from pathlib import Path
from random import Random

LINES = 200
NUMBERS = [
    *((0.45, 0, 200), (0.0, -2, 18_000), (0.2, 0, 65_000), (0.2, 0, 280), (0.05, 0, 1_600_000), (0.25, 0, 12_000)),
    *((0.05, 0, 1_100), (0.01, 0, 540), (0.05, 0, 5_600), (0.45, 0, 4), (0.05, 0, 79), (0.77, 0, 98), (0.2, 0, 770)),
]
"""Criteo's 13: how many are missing, the least, the largest."""
CATEGORIES = [
    *((0.0, 147), (0.0, 360), (0.03, 9000), (0.03, 9000), (0.0, 51), (0.13, 7), (0.0, 9000), (0.0, 76), (0.0, 3)),
    *((0.0, 9000), (0.0, 9000), (0.03, 9000), (0.0, 9000), (0.0, 22), (0.0, 9000), (0.03, 9000), (0.0, 9), (0.0, 1000)),
    *((0.45, 450), (0.45, 3), (0.03, 9000), (0.82, 7), (0.0, 12), (0.03, 9000), (0.45, 37), (0.45, 9000)),
]
"""Criteo's 26: how many are missing, how many different values there are."""
HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
HEXADECIMAL = (340, 280, 14, 290, 28, 14, 875, 9000, 1000)
"""Different values of Avazu's site_id to device_model."""


def popular(random: Random, values: int) -> int:
    """One of so many, the first ones far more often."""
    return int(values * random.random() ** 4)


def hexadecimal(column: object, value: int) -> str:
    """What a value of a column looks like."""
    return f"{Random(f'{column} {value}').getrandbits(32):08x}"


def criteo_line(random: Random) -> str:
    cells = [str(int(random.random() < 0.22))]
    for missing, least, largest in NUMBERS:
        number = max(least, int(largest * random.random() ** 6) + least * (random.random() < 0.3))
        cells.append("" if random.random() < missing else str(number))
    for column, (missing, values) in enumerate(CATEGORIES):
        cells.append("" if random.random() < missing else hexadecimal(column, popular(random, values)))
    return "\t".join(cells)


def avazu_line(random: Random, number: int) -> str:
    hour = f"1410{21 + number // 100}{number % 100 // 5:02}"  # two days, in order
    cells = [str(random.randrange(10**16, 2**64)), str(int(random.random() < 0.17)), hour]
    cells += [random.choice(["1005", "1005", "1005", "1002", "1010"]), random.choice("00014")]
    cells += [hexadecimal(column, popular(random, values)) for column, values in enumerate(HEXADECIMAL)]
    cells += [random.choice("11110"), random.choice("00023")]
    cells += [str(random.randrange(375, 24_000)), random.choice(["320", "320", "300", "216"])]
    cells += [random.choice(["50", "50", "250", "36"]), str(random.randrange(112, 2_800)), random.choice("0032")]
    cells += [random.choice(["35", "35", "431", "1839"]), random.choice(["-1", "100084", "100077"])]
    return ",".join([*cells, str(random.choice([79, 79, 157, 23]))])


def main() -> None:
    random, here = Random(0), Path(__file__).parent
    (here / "criteo.txt").write_text("".join(criteo_line(random) + "\n" for _ in range(LINES)))
    lines = [HEADER, *(avazu_line(random, number) for number in range(LINES))]
    (here / "avazu.csv").write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
