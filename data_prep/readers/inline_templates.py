"""Text of templates that are part of a sentence.

A page shows a template's text, of which a dump has only the call. The names are those most frequent inside lines of prose of English
Wikipedia, and their counterparts in other languages. The text of any other call is not known.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar

# most characters of a template whose text is kept, such as a quotation, and of its name
LONGEST, LONGEST_NAME = 4000, 60

# an apostrophe that is text beside the quotes of italics: ''Eagle''{{'s}}
APOSTROPHE = "\3"
# marker before a fraction, which becomes a space after a digit: 3{{frac|1|2}}
FRACTION = "\4"

Values = list[str]
Named = dict[str, str]
Function = Callable[[Values, Named], str | None]
Meaning = TypeVar("Meaning")


def by_name(table: Iterable[tuple[Meaning, str]]) -> dict[str, Meaning]:
    """name → meaning, of pairs (meaning, names with | between them)."""
    return {name: meaning for meaning, names in table for name in re.split(r"\s*\|\s*", names.strip())}


# templates that are characters
CHARACTERS = by_name((
    (" – ", "snd|spnd|snds|sndash|spndash|spaced ndash|spaced en dash|-snd|–"),
    ("–", "ndash|en dash|endash"),
    (" — ", "spaced mdash|spaced em dash|smd"),
    ("—", "mdash|em dash|emdash|mdashb|—"),
    ("'", "'|apostrophe|apos"), ("'s", "'s"), ("'\"", "' \"|'\""), ("\"'", "\" '|\"'"), ('"', '-"|"-'),
    (" ", "nbsp|space|spaces|thinsp|thin space|hair space|hairsp|ensp|emsp|figure space|esp|insécable"),
    (" · ", "dot|·|•|middot|bull|bullet"), ("\n", "br|break"),
    ("×", "times"), ("−", "minus"), ("±", "plus-minus"), ("°", "deg"), ("′", "prime"), ("⇌", "eqm"), ("=", "="),
    ("ʻ", "okina|'okina"), ("ʿ", "ayin"), ("ʾ", "hamza"), ("C", "carbon"), ("H", "hydrogen"), ("O", "oxygen"), ("CO2", "co2"),
    ("H2O", "h2o"), ("e", "e|ème"), ("er", "er"), ("1er", "1er"), ("Ier", "ier"), ("no", "n°|numéro"), ("BC", "bc"), ("AD", "ad"),
    ("av. J.-C.", "av jc|av. j.-c."), ("apr. J.-C.", "ap jc|apr. j.-c."), ("c.", "circa"), ("fl.", "floruit"), ("b.", "born"),
    ("♯", "sharp|music sharp"), ("♭", "flat|music flat"), ("♮", "music natural"),
))  # fmt: skip
# abbreviations and signs before an argument
BEFORE = by_name((
    ("c. ", "circa|c.|ca."), ("fl. ", "floruit|fl."), ("b. ", "b.|born"), ("d. ", "d.|died"), ("r. ", "r.|reign"), ("no ", "n°|numéro"),
    ("US$", "us$|usd|$"), ("A$", "a$|aud"), ("C$", "cad|c$"), ("€", "€|eur|euro"), ("£", "£|gbp"), ("¥", "¥|jpy"), ("₹", "₹|inr|indian rupee"),
    ("§ ", "§"), ("√", "radic"), ("M. ", "m."), ("Mme ", "mme"), ("Dr ", "dr"), ("U.S. Patent ", "us patent"), ("y. ", "yaklaşık"),
))  # fmt: skip
# templates that are one of their arguments: its number (-1: the last)
ARGUMENT = by_name((
    ("1", """nowrap|nobr|nobreak|nowr|nwr|no wrap|nobold|noitalic|nocaps|em|strong|small|smaller|midsize|large|larger|big|huge|
        smallcaps|sc|sc1|sc2|scsmall|small caps|abbr|abbrlink|tooltip|h:title|explain|comment|typo|as written|proper name|chem name|chem2|
        dfn|vanchor|visible anchor|citation needed span|cns|cn span|clarify span|mvar|math|overline|underline|u|kbd|key|code|mono|tt|samp|
        var|unicode|polytonic|hebrew|arabic|nastaliq|vr|angbr|grapheme|gloss|lit|literal|sub|ind|flag|flagu|flagcountry|nihongo2|
        nihongo foot|citation|railgauge|nq|quote|blockquote|bquote|cquote|quotation|poemquote|poem quote|pull quote|format price|fnum|nts|not a typo|
        ill|interlanguage link|interlanguage link multi|illm|zitat|"|polytonisch|fachbegriff|citation bloc|petites capitales|pc|
        minuscules|abréviation|abréviation discrète|abrd|abr|refnec|refsou|référence nécessaire|guil|incise|versalita|esd|cita|maiuscoletto|
        citazione|citazione necessaria|senza fonte|chiarire|tutto attaccato|цитата|число|仮リンク|要出典範囲|補助漢字フォント|
        jis2004フォント|ruby|lang-en-short|إنجليزية|إنج|اقتباس|به انگلیسی|alıntı|引用|임시링크|link-en|le|cytat|citaat|ipalink"""),
    ("2", "lang|langue|langx|dil|llang|wikt-lang|mention|rtl-lang|color|colour|resize|script|font color|fontcolor"),
    ("-1", "w|transl|transliteration|tlit|xlit|tsl"),
))  # fmt: skip
# one text of all arguments: between them, nothing or a space
JOINED = by_name((
    ("", "gaps|linktext"),
    (" ", "unidad|m|num|höhe|s.|nuclide2|bibleverse|bibelstelle|quran-usc|heure"),
))  # fmt: skip
SHIPS = frozenset(
    "HMS USS SS RMS MV MS MT HMAS HMCS HMNZS HMIS INS SMS USNS USCGC USRC USAT RV RRS PS TSS HNLMS HNoMS HSwMS HDMS ORP ROKS BAP ARA "
    "GTS NOAAS RFA HMT HMHS TCG KRI PNS CSS SAS ship".lower().split()
)
# Templates that leave no gap in a sentence: footnotes, pronunciation, notes to editors, anchors, boxes.
NOTHING = re.compile(
    r"""(?:cite|harv|sfn|efn|refn|ref|audio|ipac?|pron|use|short\ desc\w*|see\ also|main|further|about|for|coord\ missing|flagicon|
        sister\ project|expand|more\ citations|icon|col|multicol|legend|toc|defaultsort|displaytitle|cleanup|pp|anchor)(?:[\ \-_/].*)?
    |.*[\ \-](?:needed|inline|icon|needed\?)|[\w\-]*\ ?icon
    |sfnm?p?|efn|e?notes?|note\ ?tag|note\ ?label|rp?|rs|refbegin|refend|reflist|notelist|\#tag:ref|fact|cn|fn|clarify|vague|dubious|disputed
    |(?:(?:by|according\ to|for)\ )?(?:which|who|whom|whose|when|where|why|how|what)\??|dead\ ?link|full|failed\ verification|fv|specify
    |verify(?:\ (?:source|credibility))?|unreliable(?:\ \w+)?\??|self-published.*|original\ research\??|or|pov|weasel|synthesis\??|relevance
    |update(?:\ after)?|(?:not|nonspecific)\ in\ source|contradict|inflation[/-]fn|sub?scription(?:\ required)?|wayback|webarchive
    |oclc|isbn|issn|doi|jstor|pmid|imdb\ \w+|youtube|official(?:\ website)?|url|respell|listen|h-audio|x-sampa|anchors?
    |shy|wbr|zwn?j|zwsp|lrm|rlm|rtl|ltr|clear|-|clr|0|!|nowrap\ (?:begin|end)|italic\ ?title|lowercase\ ?title|noteta|refimprove.*
    |portal.*|commons.*|div\ col.*|flatlist|endflatlist|plainlist|endplainlist|quote\ box|rquote|flagdeco|(?:start|end)\ .*|infobox.*|cref2?
    |internetquelle|literatur|bibisbn|belege.*|ouvrage|article|lien\ web|référence|quoi|qui|quand|où|précision|drapeau|kaynak(?:\ .*)?|kim
    |要出典|要検証|誰|いつ|どこ|要説明|脚注.*|بحاجة\ لمصدر|مصدر|حقيقة|من|متى|أين|وضح|cita\ requerida|demostrar|aclarar|quién|cuándo
    |noto|da\ chi|quando|нет\ аи|источник\??|уточнить|когда\??|кто\??|какой\??|сноска|ударение|来源请求|來源請求|谁|何时|fakt|odn
    |bron\?|feit|källa\ behövs|carece\ de\ fontes|джерело\??|مدرک|출처""",
    re.VERBOSE,
)
# further templates with a known text: of languages and scripts, abbreviations that are their names ({{ang.}})
KNOWN_NAME = re.compile(r"(?:lang|langue|script)[-/].+|(?:formatnum|lc|uc|lcfirst|ucfirst):.*|sic|[^\W\d_]{1,8}\.")
# a reference in English, a quotation in French; templates that are also used without a text
MAY_BE_EMPTY = ("citation", "lang", "vanchor")
# a name of an argument; a number is a place
NAME = re.compile(r"(?!\d+$)[\w -]{1,30}")
# quotations in paragraphs of their own
BLOCKS = by_name((
    ("", "quote|blockquote|bquote|cquote|quotation|poemquote|poem quote|pull quote|zitat|citation bloc|cita|citazione|цитата|alıntı|اقتباس|引用"),
))  # fmt: skip
# words between the numbers of a range in {{convert}}
RANGES = by_name((
    ("–", "-|–"), (" to ", "to"), (" and ", "and"), (" or ", "or"), (" by ", "by"), (" × ", "x|×"), (" ± ", "+/-|±"),
))  # fmt: skip
POWERS = {"e3": "thousand ", "e6": "million ", "e9": "billion "}
RAISED = str.maketrans("0123456789+-−n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻ⁿ")
LOWERED = str.maketrans("0123456789+-−", "₀₁₂₃₄₅₆₇₈₉₊₋₋")
RAISABLE = re.compile(r"[0-9+\-−n]+")


def expand_call(call: str) -> str | None:
    """The text of a template by the content of its braces, with templates and links inside it already resolved; None if not known."""
    head, bar, rest = call.partition("|")
    head = head.strip().replace("_", " ")
    kind = _kind(head) if len(head) <= LONGEST_NAME else _UNKNOWN
    if kind == _NO:
        return ""
    if kind == _UNKNOWN and (not bar or len(rest) > 100):
        return None
    name = head.lower()
    values: Values = []
    named: Named = {}
    for argument in rest.split("|") if bar else ():
        key, is_named, value = argument.partition("=")
        if is_named and NAME.fullmatch(key.strip()):
            named[key.strip().lower()] = value.strip()
        else:
            values.append((value if is_named and key.strip().isdecimal() else argument).strip())
    if kind == _UNKNOWN:  # with a date alone: a note to editors
        return "" if not values and named.keys() <= {"date", "reason"} else None
    return _known(head, name, values, named)


_NO, _UNKNOWN, _KNOWN = range(3)


@lru_cache(maxsize=1 << 12)
def _kind(head: str) -> int:
    """Whether templates of a name leave no gap, have an unknown text, or a known one."""
    name = head.lower()
    tables = (FUNCTIONS, SHIPS, BEFORE, CHARACTERS, JOINED, ARGUMENT)
    if any(name in table for table in tables) or KNOWN_NAME.fullmatch(name) or re.fullmatch("[a-z]{2,3}S", head):
        return _KNOWN
    return _NO if NOTHING.fullmatch(name) else _UNKNOWN


def _known(head: str, name: str, values: Values, named: Named) -> str | None:
    first = values[0] if values else ""
    if ":" in name:  # formatnum:1234
        return head.partition(":")[2].strip()
    if name in FUNCTIONS:
        function = FUNCTIONS[name]
        return function(values, named) if first or function in OF_NAMED else None
    if name in SHIPS:
        return _ship(values if name == "ship" else [head, *values])
    if first and name == "e":
        return f"×10{first.translate(RAISED)}"
    if first and name in BEFORE:
        return " – ".join(BEFORE[name] + value for value in values[:2] if value)
    if name in CHARACTERS:
        return CHARACTERS[name].replace("'", APOSTROPHE)
    if first and name in JOINED:
        return JOINED[name].join(filter(None, values))
    if place := int(ARGUMENT.get(name, 0)):
        given = values[place - (place > 0) :][:1]
        text = given[0] if given else named.get("text") or named.get("quote")
        if text and name in BLOCKS:
            return f"\n{text}\n"
        return text or ("" if name in MAY_BE_EMPTY else None)
    if name.endswith(".") and not values:  # an abbreviation
        return head
    return first if first or name == "sic" else None


def _ship(values: Values) -> str | None:
    """Prefix, name and hull number or year; the last argument says which of them are shown."""
    prefix, name, number, shown = (*values, "", "", "", "")[:4]
    if shown == "1":
        return number or None
    text = name + (f" ({number})" if number and shown in ("", "5") else "")
    if shown not in ("2", "5"):
        text = f"{prefix.upper() if prefix.islower() else prefix} {text}"
    return text if name else None


def _amount(values: Values, _: Named) -> str | None:
    """The quantity that {{convert}} is given, without its conversion: numbers, or a range of them, and the unit."""
    number, *rest = values
    while len(rest) > 1 and rest[0] in RANGES:
        number, rest = number + RANGES[rest[0]] + rest[1], rest[2:]
    unit = rest[0] if rest else ""
    unit = POWERS.get(unit[:2], unit[:2]) + unit[2:]
    if len(rest) > 2 and rest[2] in ("in", "oz", "lb"):  # 5 ft 11 in
        unit = " ".join(rest[:3])
    unit = {"C": "°C", "F": "°F", "C-change": "°C", "sqmi": "sq mi"}.get(unit, unit)
    return f"{number} {re.sub('(?<=m)[23]$', lambda power: power[0].translate(RAISED), unit)}".rstrip()


def _number_and_unit(values: Values, named: Named) -> str | None:
    """{{val}}, {{unité}}: a number, its power of ten, its unit with powers as numbers of their own."""
    if not values:
        return None
    power = f"×10{named['e'].translate(RAISED)}" if named.get("e") else ""
    error = f"±{values[1]}" if len(values) > 1 and values[1][:1].isdigit() else ""
    unit = named.get("u") or named.get("ul") or "".join(v.translate(RAISED) for v in values[1:] if not error)
    return f"{values[0]}{error}{power} {unit}".rstrip()


def _fraction(values: Values, _: Named) -> str:
    whole, above, below = {1: ("", "1", *values), 2: ("", *values)}.get(len(values), (*values, "", "")[:3])
    return f"{whole} {above}/{below}" if whole else f"{FRACTION}{above}/{below}"


def _date(values: Values, named: Named) -> str | None:
    """Day, month and year of (year, month, day), or the values as they are written."""
    numbers = [value for value in values if value][:3]
    if numbers and re.fullmatch(r"\d{4}", numbers[0]):
        numbers = [calendar.month_name[int(n)] if i == 1 and n in MONTHS else n for i, n in enumerate(numbers)][::-1]
    return " ".join(numbers) or None


def _as_of(values: Values, named: Named) -> str | None:
    date = _date(values, named)
    words = "Since" if named.get("since") else "As of"
    return named.get("alt") or (date and f"{words.lower() if named.get('lc') else words} {date}")


def _coordinates(values: Values, named: Named) -> str | None:
    """52°30′N 13°22′E, or two decimal numbers; nothing where they are shown beside the title."""
    if named.get("display") in ("title", "t"):
        return ""
    found, signs = "", "°′″"
    for value in values:
        if re.fullmatch("[NSEWO]", value):
            found, signs = f"{found}{value} ", "°′″"
        elif re.fullmatch(r"-?[\d.]+", value) and signs:
            found, signs = found + value + signs[0], signs[1:]
        else:
            break
    return found.strip() if found.endswith(" ") else ", ".join(values[:2])


def _with_reading(values: Values, _: Named) -> str | None:
    """{{nihongo}}: a name, and its script and reading in brackets."""
    name, *rest = values or [""]
    rest = [value for value in rest if value]
    return f"{name} ({', '.join(rest)})" if name and rest else name or ", ".join(rest) or None


def _named_values(values: Values, named: Named) -> str | None:
    """{{zh}}: the same word in several writings."""
    texts = (text for key, text in named.items() if key not in ("labels", "links", "first", "lang"))
    return "; ".join([*values, *texts]) or None


def _chemistry(values: Values, _: Named) -> str:
    """{{chem|H|2|O}}, with charges raised: Si4⁴⁻."""
    return "".join(v.translate(RAISED) if re.fullmatch(r"\d*[+\-−]", v) else v for v in values)


def _century(values: Values, _: Named) -> str:
    """French {{s|XIX|e}}; the text itself in Russian."""
    is_roman = re.fullmatch("[IVXLC]+", values[0])
    return f"{values[0]}{''.join(values[1:2] or 'e')} siècle" if is_roman else values[0]


def _foreign_link(values: Values, named: Named) -> str | None:
    """{{lien}}: a link to another language's page."""
    texts = (named.get(name) for name in ("texte", "نص", "trad", "fr", "عر"))
    return next(filter(None, texts), None) or next(iter(values), None)


# functions for which a first argument isn't needed
OF_NAMED = (_as_of, _with_reading, _named_values, _foreign_link)
MONTHS = tuple(form % month for month in range(1, 13) for form in ("%d", "%02d"))
FUNCTIONS: dict[str, Function] = by_name(
    (
        (_amount, "convert|cvt|converter|convertir|çevir|تحويل|конвертировать"),
        (_number_and_unit, "val|unité|nombre|nb|unit"),
        (_fraction, "frac|sfrac|fraction|bruch|дробь|kesir"),
        (_date, "start date|end date|date|date-|birth date|death date|dts|birth date and age|start date and age"),
        (_as_of, "as of|asof"),
        (_coordinates, "coord|coordinate|coor dms|coor dm"),
        (_with_reading, "nihongo|nihongo3|japonais|読み仮名|korean|chinese"),
        (_named_values, "zh|zh-cn|ko-hhrm"),
        (_chemistry, "chem|fchim"),
        (lambda v, _: v[0].translate(RAISED) if RAISABLE.fullmatch(v[0]) else v[0], "sup|exp"),
        (lambda v, _: " ".join(v[:2]), "bibleref"),
        (lambda v, _: f"{v[0]} [O.S. {v[2]}] {v[1]}" if len(v) == 3 else None, "oldstyledate|oldstyledatedy"),
        (lambda v, _: f"{v[0]}-class {v[1]}" if len(v) > 1 else None, "sclass|sclass2|sclass-"),
        (lambda v, _: f"{' and '.join(v[:-1])} ({v[-1]})" if len(v) > 1 else None, "harvtxt|harvcoltxt"),
        (lambda v, _: f"/{v[0]}/", "ipaslink"),
        (lambda v, _: f"[{v[0]}]", "ipablink"),
        (_century, "s|s-|siècle|siglo"),
        (lambda v, _: "".join(v[1:2]) or v[0], "нп3|нп5|не переведено|не переведено 3|не переведено 5"),
        (_foreign_link, "lien|وصلة إنترويكي"),
    )
)
