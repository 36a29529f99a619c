"""Tell which words after a number are its unit, and which change its value.

``10 apples`` is 10 of something; ``10 million``, ``10 or 11``, ``10 halves`` are not. Any word of any script
may be a unit but those in NOT_UNITS, which holds English and the commonest words of other languages.
"""

from __future__ import annotations

import re

_NAMES = """
m: meter metre м метр | km: kilometer kilometre км | cm: centimeter centimetre см | mm: millimeter millimetre
mi: mile | ft: foot feet | in: inch inches | yd: yard | s: sec second с | min: minute mins | h: hr hour ч
day: d | week: wk | month: mo | yr: year | g: gram gramme gm г | kg: kilogram kilo кг | mg: milligram
t: ton tonne | lb: pound | oz: ounce | l: liter litre | ml: milliliter millilitre | gal: gallon
degree: deg | rad: radian | mph: mi/h | km/h: kmh kph kmph | m/s: mps | hz: hertz | n: newton | j: joule
w: watt | kw: kilowatt | v: volt | ohm: Ω | pa: pascal | mol: mole | k: kelvin | acre: | pm: | am:
dollar: usd buck | cent: ¢ | euro: eur | yuan: yen jpy cny rmb | rupee: rs inr | unit: | way: | item: | bit:
a: ampere amp | c: coulomb | f: farad | byte: | point: pt | man: men | woman: women | person: people
"""
UNITS = {
    name: canonical
    for entry in re.split(r"[|\n]", _NAMES.strip())
    for canonical, names in [map(str.strip, entry.split(":"))]
    for name in (canonical, *names.split())
}
"""Each known spelling (singular, lower case) to the unit's name."""
CURRENCIES = {r"\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yuan", "¢": "cent"}
SIZES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten."""
_OTHER_WORDS = """
hundred thousand million billion trillion dozen score half halves third thirds fourth fourths quarter quarters
fifth fifths sixth sixths eighth eighths ninth ninths tenth tenths hundredths thousandths times plus minus
over mod modulo choose squared cubed factorial root power and or not no but if unless otherwise maybe perhaps
possibly probably to than more less fewer most least about except when for where with without only either
neither nor approximately approx roughly of is isn was then else given wrong incorrect false true yes sin cos
tan cot sec csc ln log exp sqrt cis inf infinity infty pi alpha beta gamma delta epsilon theta lambda mu phi
psi omega sigma tau rho remainder hundreds dozens lakh lakhs crore crores seventh sevenths eleventh elevenths
twelfth twelfths twentieth twentieths below negative doubled tripled factorials impossible incorrectly
mil mille millon millón millones milhão milhões milione milioni milliard milliards tausend hundert
millionen milliarden тысяч тысячи тысяча тыс миллион миллиона миллионов млн миллиард миллиарда миллиардов
млрд сто половина половин хиляди милиона или не oder nicht und ou et pas y ni o e u bin milyon ribu juta
nghìn triệu हज़ार हजार लाख करोड़ या और لاکھ ہزار کروڑ ألف الف مليون مليار أو אלף מיליון או พัน หมื่น แสน
ล้าน หรือ
"""
NOT_UNITS = frozenset(re.sub(r"[^\w\s]", "", _OTHER_WORDS).split())
"""Words after a number that are no unit, without signs that are no letters."""
_CJK_NOT_UNITS = re.compile("[万萬億亿千百十兆만억조천백半或和與与至到不非以上下余餘多倍分]")
_POWERS = {"sq": 2, "square": 2, "cubic": 3, "cu": 3}


def unit_name(words: str, power: str = "", bare: bool = False) -> str | None:
    r"""Return one name for the unit that ``words`` spell (``sq. km`` is ``km^2``), None if they spell none.
    ``bare``: they stood in mathematics, not in ``\text{}``; short words may be variables there."""
    # ``sq. km/h``: sq, km, /, h
    tokens = re.findall(r"[^\W\d_]+|/", words.lower().replace(".", ""))
    if not tokens or any(token in NOT_UNITS for token in tokens) or _CJK_NOT_UNITS.search(words):
        return None
    known = all(token == "/" or _canonical(token) in UNITS.values() for token in tokens)
    if len(tokens) == len(tokens[0]) == 1 and tokens[0].isascii() and not known:
        return None  # a variable's name
    rate = known and len(tokens) == 3 and ("".join(tokens) in UNITS or _is_word(tokens[2]))  # m/s, g/cm
    if bare and not rate and not (_is_word(tokens[0]) and (known or all(map(_is_word, tokens)))):
        return None
    if bare and tokens[0] == "/" and not all(map(_is_word, tokens)):
        return None  # 1/n is a quotient, 60/hour a rate
    # ``sq km`` and ``km^2`` are one unit.
    for token in [token for token in tokens if token in _POWERS]:
        tokens.remove(token)
        power = power or str(_POWERS[token])
    names = ["/" if token == "per" else _canonical(token) for token in tokens]
    name = " ".join(names).replace(" / ", "/")
    return UNITS.get(name, name) + (f"^{power}" if power not in ("", "1") else "")


def is_known(unit: str) -> bool:
    """Return True for one of UNITS, whatever its power, alone or as a quotient."""
    return all(part in UNITS.values() for part in unit.partition("^")[0].split("/"))


def _is_word(token: str) -> bool:
    if token == "/" or token in _POWERS or token == "per":
        return True
    if not token.isascii():
        return len(token) > 1 or ord(token) > 0x2E7F  # one CJK sign is a word, one Cyrillic letter a variable
    # Four letters make a word; fewer must spell a unit, since ``ab`` may be a product.
    return len(token) > 3 or (len(token) > 1 and _canonical(token) in UNITS.values())


def _canonical(token: str) -> str:
    singular = token if token in UNITS else token.removesuffix("s")
    return UNITS.get(singular, singular)
