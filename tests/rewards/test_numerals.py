"""Numbers as people write them, by value; docs/recipes.md says what ambiguous ones mean."""

from fractions import Fraction

import pytest

from jaxrl_llm.rewards.numerals import last_number, to_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12+7=19", "19"),
        ("it is -4", "-4"),
        ("5-3", "3"),
        ("1,234.50 dollars.", "1,234.50"),
        ("1,2,3", "3"),
        ("half, or 1/2", "1/2"),
        ("wait...12.", "12"),
        ("\u7b54\u6848\u662f12\u3002", "12"),
        ("none", None),
        ("1.5e3 metres", "1.5e3"),
        ("1.5em", "1.5"),
        ("it is \u22124", "-4"),
        (r"\frac{1}{2}", "1/2"),
        ("42 cm^2", "42"),
        ("42 m\u00b2", "42"),
        (r"a_{1} = 42 \text{ cm}^{2}", "42"),
        ("x = 7, and x^-2", "7"),
        (r"7\sqrt{4}", "7"),
        (r"42^\circ", "42"),
        ("3 apples at 5:30", "3"),
        ("3 apples on 2024-01-05", "3"),
        ("**10** 3", "3"),
        ("**Total: 10**\n**3 left**", "3"),
        ("12 345 6", "6"),
        ("42\nMillions of others", "42"),
        ("$3k$", "3"),
    ],
)
def test_the_last_number_as_written(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234),
        ("$12.00", 12),
        ("50%", 50),
        ("7.", 7),
        ("-3/4", Fraction(-3, 4)),
        (".5", Fraction(1, 2)),
        ("3/0", None),
        ("1,2", Fraction(6, 5)),  # a decimal comma; 1,234 has thousands
        ("12 apples", None),
        ("9" * 5000, None),
        ("\u0663", None),  # a digit, but not an ASCII one
        ("1.5e3", 1500),
        ("-2E-3", Fraction(-1, 500)),
        ("1e9999", None),
        ("0,125", Fraction(1, 8)),
        ("3,1416", Fraction(31416, 10_000)),
        ("1.234,56", Fraction(123456, 100)),
        ("1.234.567", 1_234_567),
        ("1.234", Fraction(1234, 1000)),
        ("1,00,000", 100_000),
        ("(2,5)", None),  # a point
        ("1,2,3", None),
        ("1{,}5", Fraction(3, 2)),
        ("1 234 567", 1_234_567),
        ("-1 234.5", Fraction(-2469, 2)),
        ("1 23", None),
        ("0 123", None),
        ("1234 567", None),
        ("1'234", 1234),
        ("1_000", 1000),
        ("10^6", 1_000_000),
        ("10^{-3}", Fraction(1, 1000)),
        ("10**6", 1_000_000),
        ("2 ** 10", 1024),
        ("-10\u2076", -1_000_000),
        ("1.5 x 10^6", 1_500_000),
        ("1.5*10**6", 1_500_000),
        ("1,5 \u00d7 10\u207b\u00b2", Fraction(15, 1000)),
        ("2^3^2", None),
        ("0^-1", None),
        ("9^999", None),
        ("1.5 million", 1_500_000),
        ("3 hundred thousand", 300_000),
        ("1 1/2 billion", 1_500_000_000),
        (r"\$2.5\text{ million}", 2_500_000),
        ("$2.5k", 2500),
        ("\u20ac3bn", 3_000_000_000),
        ("2.5k", None),  # no price: a letter that some formula names
        ("3 and a half", Fraction(7, 2)),
        ("\uff14\uff12", 42),
        ("5:30", None),
        ("3 : 4", None),
        ("2024-01-05", None),
        ("0x1F", None),
        (r"3 \times 10^5", 300_000),
        (r"1.5\cdot10^{-2}", Fraction(3, 200)),
        ("\u22125", -5),
        ("-$5", -5),
        (r"-\$5.50", Fraction(-11, 2)),
        (r"\$18", 18),
        (r"50\%", 50),
        (r"1{,}234{,}567", 1234567),
        (r"1,\!234", 1234),
        (r"1\,234.5", Fraction(2469, 2)),
        (r"1\,2", None),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"\frac{1}{0}", None),
        (r"\frac{x}{2}", None),
        ("**42**.", 42),
        ("$5$.", 5),
        (r"\(5\).", 5),
    ],
)
def test_numbers_are_compared_by_value(text, value):
    assert to_number(text) == value
