"""Wikitext to prose.

One pass in linear time that removes all markup. Markup without sentences (boxes, tables, references, files, categories, lists of links)
is dropped with its content; links, emphasis and tags keep their text. A template or formula inside a sentence becomes its text, or the
sentence is dropped and counted. The grammar is that of https://www.mediawiki.org/wiki/Help:Formatting and Help:Links, Help:Tables,
Help:Templates. The parser library mwparserfromhell is only the tests' oracle: it reads 0.7 MB/s, can't be interrupted, and needs 7 s
for 32 KB of `<b>`.
"""

from __future__ import annotations

import re
from collections import Counter

from data_prep.readers import formulas, inline_templates
from data_prep.readers.formulas import formula
from data_prep.readers.inline_templates import LOWERED, RAISABLE, RAISED
from data_prep.text import sentences
from data_prep.text.clean import unescape
from megabert.data.text import CLOSING, GLUED_END, INVISIBLE, SCRIPT_TERMINALS, writes_without_spaces

# what is dropped from pages that are kept, for the report
UNKNOWN_TEMPLATE = "sentences with a template of unknown text"
AS_FOOTNOTE = "templates of unknown text after a sentence"
NO_FORMULA, LIST_ITEM = "sentences with a formula or a tag as text", "list items that are not sentences"
SECTION = "sections of references and links"
# Marks of a template and of a formula without text. XML has neither character.
GAPS = {"\1": UNKNOWN_TEMPLATE, "\2": NO_FORMULA}
TEMPLATE_GAP, FORMULA_GAP = GAPS
GAP = re.compile("[\1\2]")
SOUND = re.compile(r"ipa(?:-[\w-]+)?\s*\|([^|]*)", re.IGNORECASE)

# Tags that are dropped with their content; unpaired ones are dropped alone.
OPAQUE = (
    "ref|references|math|chem|ce|gallery|timeline|source|syntaxhighlight|score|imagemap|hiero|graph|mapframe|maplink|"
    "templatedata|templatestyles|categorytree|inputbox|indicator|pre|code|del|table|noinclude"
)
EXTENSION = re.compile(rf"<!--|-->|<(/?)({OPAQUE})\b([^<>]*)>", re.IGNORECASE)
BRACES = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}(?!\})")
# characters before a table's mark in its line: spaces and list marks
INDENT = 64
KINDS = {"{{": "}}", "[[": "]]", "{|": "|}"}
# depth of links inside links, and of templates inside templates; deeper ones are not text
DEPTH = 8
# Names of the namespaces of files and categories where a dump does not say them, and aliases, which no dump says.
_NO_TEXT = """
    file image media category datei bild kategorie fichier catégorie archivo imagen categoría ficheiro imagem arquivo
    multimédia categoria immagine bestand afbeelding categorie plik grafika kategoria файл изображение категория зображення
    категорія ファイル 画像 カテゴリ 文件 档案 檔案 圖像 图像 分类 分類 dosya resim kategori medya ملف صورة وسائط تصنيف fil soubor tiedosto kuva
    luokka fájl kép kategória kategorija datoteka fișier fişier imagine αρχείο εικόνα κατηγορία 파일 그림 분류 پرونده تصویر رده
    berkas gambar tập_tin hình thể_loại קובץ תמונה קטגוריה चित्र श्रेणी চিত্র বিষয়শ্রেণী ไฟล์ ภาพ หมวดหมู่ картинка слика
    датотека категорија fitxer imatge fitxategi
"""
NO_TEXT = frozenset(_NO_TEXT.split())
OTHER_WIKI = re.compile(r"\s*:?[a-z][a-z-]{1,14}:")
# possessive, since an unclosed one would be tried at every length
EXTERNAL = re.compile(r"\[(?:(?:https?:|ftp:)?//|mailto:)[^\s\[\]]*+[ \t]*+([^\[\]\n]*+)\]", re.IGNORECASE)
BREAK = re.compile(r"<(?:br|p|hr|/p|/div|div|li|/li|blockquote|/blockquote|poem|/poem|center|/center)\b[^<>]*>", re.IGNORECASE)  # fmt: skip
# bare or with attributes; a comparison (a<b) is not a tag
TAG = re.compile(r"</?[a-zA-Z][\w-]*(?:\s*/?>|\s[^<>]{0,200}=[^<>]*>)|<ref\b[^<>\n]*", re.IGNORECASE)
# the apostrophe of ''Eagle'''s, behind italics
POSSESSIVE = re.compile(r"(?<!')''([^'\n]{1,80})'''(?=s\b)")
QUOTES = re.compile(r"'{2,}")
BEHIND_NUMBER = re.compile(rf"(?<=\d){inline_templates.FRACTION}")
MAGIC = re.compile(r"__[A-Z]{3,}__|-\{|\}-")
LEFT_OVER = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}|\|-+")
# empty parentheses, unless they follow a name as in main()
HOLLOW = re.compile(r"(?<![A-Za-z0-9_])\([\s,;:]*\)")
# not before a name, as in .NET
FULL_STOP = re.compile(r" \.(?!\w)")
OPENED = re.compile(r"\([\s,;]+")
TIDIED = ((" ,", ","), (" )", ")"), (",)", ")"), (";)", ")"), (" )", ")"))
SPACES = re.compile(r"[ \t\xa0]{2,}")
LIST_WORDS = 5
# headings of sections without prose, from which on text is dropped up to a heading of the same level
_ENDING = """
    references|notes|notes and references|references and notes|footnotes|citations|sources|external links|see also|further reading|
    bibliography|works cited|gallery|literature|publications|discography|filmography|einzelnachweise|weblinks|literatur|siehe auch|quellen|
    anmerkungen|werke|diskografie|filmografie|références|voir aussi|liens externes|bibliographie|notes et références|annexes|referencias|
    enlaces externos|véase también|bibliografía|notas|notas y referencias|note|collegamenti esterni|voci correlate|bibliografia|altri progetti|
    kaynakça|dış bağlantılar|ayrıca bakınız|notlar|konuyla ilgili yayınlar|脚注|出典|参考文献|関連項目|外部リンク|注釈|関連文献|المراجع|مراجع|
    وصلات خارجية|روابط خارجية|انظر أيضًا|انظر أيضا|مصادر|هوامش|примечания|ссылки|литература|см. также|источники|przypisy|
    linki zewnętrzne|zobacz też|referenties|externe links|externe link|zie ook|bronnen|literatuur|bronnen, noten en/of referenties|referências|
    ligações externas|ver também|veja também|referenser|externa länkar|se även|källor|noter|litteratur|参考资料|參考資料|外部链接|外部連結|参见|參見|
    注释|註釋|각주|같이 보기|외부 링크|참고 문헌|примітки|посилання|література|див. також|джерела|منابع|پانویس|پیوند به بیرون|جستارهای وابسته|
    reference|externí odkazy|související články|lähteet|aiheesta muualla|katso myös|jegyzetek|források|további információk|tham khảo|
    liên kết ngoài|xem thêm|referensi|pranala luar|lihat pula|सन्दर्भ|संदर्भ|बाहरी कड़ियाँ|इन्हें भी देखें|הערות שוליים|קישורים חיצוניים|ראו גם
"""
ENDING = frozenset(name.strip() for name in _ENDING.split("|"))
SCRIPT = re.compile(r"<(sup|sub)\b[^<>]*>([^<>\n]{1,40})</\1>", re.IGNORECASE)
# -{text}-, -{zh-hans:text; zh-hant:text}-: words that differ between writings of one language
VARIANT = re.compile(r"-\{(?:[^{}|]*+\|)?(?:[a-z-]{2,8}:)?([^{};]*+)[^{}]*+\}-")
FOOTNOTE = re.compile(rf"(?<=[.!?…{re.escape(''.join(sorted(SCRIPT_TERMINALS)))}{re.escape(CLOSING)}])\x01+(?=\s|$)")


def prose(wikitext: str, no_text: frozenset[str] = NO_TEXT, changed: Counter[str] | None = None) -> str:
    """Plain text of wikitext: a paragraph a line, headings before prose, list items that are sentences.

    `no_text`: lower-case namespaces whose links have no text. Dropped text other than markup is counted in `changed`.
    """
    changed = Counter() if changed is None else changed
    text = _without_extensions(wikitext)
    if "&" in text:
        unescaped = unescape(text)
        text = _without_extensions(unescaped) if "&lt;" in text else unescaped
    text = _without_braces(text, no_text)
    if "[" in text:
        text = EXTERNAL.sub(r"\1", text)
    if "''" in text:
        if "'''s" in text:
            text = POSSESSIVE.sub(rf"\1{inline_templates.APOSTROPHE}", text)
        text = QUOTES.sub("", text)
    text = text.replace(inline_templates.APOSTROPHE, "'")
    text = BEHIND_NUMBER.sub(" ", text).replace(inline_templates.FRACTION, "")
    if "<" in text:
        text = TAG.sub("", BREAK.sub("\n", SCRIPT.sub(_script, text)))
    if "-{" in text:
        text = VARIANT.sub(r"\1", text)
    text = OPENED.sub("(", HOLLOW.sub("", LEFT_OVER.sub(" ", MAGIC.sub("", text))))
    text = SPACES.sub(" ", text)
    text = FULL_STOP.sub(".", text)
    for old, new in TIDIED:
        text = text.replace(old, new)
    return _lines(text, changed)


def _script(match: re.Match[str]) -> str:
    """Superscript numbers as characters (10⁶) or with a caret (10^6.5); subscripts as characters only after a digit
    (101₂, H2O)."""
    text, behind_digit = match[2], match.string[max(match.start() - 1, 0)].isdigit()
    is_raised = match[1].lower() == "sup"
    if not RAISABLE.fullmatch(text):
        return f"^{text}" if is_raised and behind_digit and text[0].isdigit() else text
    if is_raised:
        return text.translate(RAISED)
    return text.translate(LOWERED) if behind_digit else text


def _without_extensions(text: str) -> str:
    """Text without comments and without the tags of OPAQUE; of their content only formulas and code in a line are left.

    Of an unclosed tag only the tag is removed.
    """
    if "<" not in text:
        return text
    # (tag, its name, whether it closes); a comment has the name "!"
    tags = [(tag, (tag[2] or "!").lower(), tag[0] == "-->" or bool(tag[1])) for tag in EXTENSION.finditer(text)]
    last_end = {name: tag.start() for tag, name, closes in tags if closes}
    out: list[str] = []
    at, opened, attributes = 0, "", ""  # of the open tag
    for tag, name, closes in tags:
        if opened:
            if closes and name == opened:
                out.append(_content(name, attributes, text, at, tag.start()))
                at, opened = tag.end(), ""
            continue
        out.append(text[at : tag.start()])
        at = tag.end()
        if not closes and not (tag[3] or "").endswith("/") and last_end.get(name, -1) > tag.start():
            opened, attributes = name, tag[3] or ""
    out.append(text[at:])
    return "".join(out)


def _content(name: str, attributes: str, text: str, start: int, end: int) -> str:
    """What is left of the content text[start:end] of an extension tag."""
    if name in ("math", "chem", "ce"):
        found = formula(text[start:end]) if end - start <= formulas.LONGEST else None
        return FORMULA_GAP if found is None else found
    if name == "code":  # a tag as text would be removed from it
        content = text[start:end]
        return FORMULA_GAP if "&lt;" in content or "<nowiki" in content else _without_extensions(content)
    return text[start:end] if "inline" in attributes and end - start <= formulas.LONGEST else ""


def _without_braces(text: str, no_text: frozenset[str]) -> str:
    """Text without tables; templates and links become their text. Unclosed ones keep their text, without the mark."""
    out: list[str] = []
    opened: list[tuple[str, int]] = []  # (closing mark, length of `out` at the opening)
    depth: Counter[str] = Counter()
    at = 0
    for match in BRACES.finditer(text):
        token = match[0]
        if token in ("{|", "|}"):  # a table's mark only at the start of a line
            before = text[max(match.start() - INDENT, 0) : match.start()].rpartition("\n")[2]
            if before.strip(" \t:*#;"):
                continue
        if at < match.start():
            out.append(text[at : match.start()])
        at = match.end()
        if token in KINDS:
            if token != "[[" or depth["]]"] < DEPTH:
                opened.append((KINDS[token], len(out)))
                depth[KINDS[token]] += 1
        elif depth[token]:
            while True:
                kind, start = opened.pop()
                depth[kind] -= 1
                if kind == token:
                    break
            inner, left = out[start:], ""
            del out[start:]
            if token == "]]":
                left = _link("".join(inner), no_text)
            elif token == "}}" and depth[token] < DEPTH:
                left = _template(inner, out[-4:])
            if left:
                out.append(left)
    out.append(text[at:])
    return "".join(out)


def _link(inner: str, no_text: frozenset[str]) -> str:
    """The text of a link: its label, else its target; nothing for files, categories and other wikis."""
    target, _, label = inner.partition("|")
    space, is_other, _ = target.partition(":")
    if is_other and (namespace(space) in no_text or (not label and OTHER_WIKI.match(target))):
        return ""
    return label.rpartition("|")[2] if label else target.lstrip(" :")


def namespace(name: str) -> str:
    """A namespace's name as it is compared."""
    return INVISIBLE.sub("", name).strip().replace(" ", "_").lower()


def _template(inner: list[str], before: list[str]) -> str:
    """The text of a template; TEMPLATE_GAP if it is not known, nothing for a box, which has several lines.

    `before`: the text before it, by which the pronunciation of a name, which is dropped, differs from a sound in a sentence.
    """
    if sum(map(len, inner)) > inline_templates.LONGEST:
        return ""
    call = "".join(inner)
    if sound := SOUND.match(call):
        line = "".join(part[-INDENT:] for part in before).rpartition("\n")[2].rstrip()
        is_pronunciation = line.endswith("''") or line.rfind("(") > line.rfind(")")
        return "" if is_pronunciation else f"[{sound[1]}]" if sound[1].isalpha() else sound[1]
    text = inline_templates.expand_call(call)
    return text if text is not None else "" if "\n" in call else TEMPLATE_GAP


def _lines(text: str, changed: Counter[str]) -> str:
    """Lines of prose: without table rows, list items that are not sentences, and sections of links."""
    kept: list[str] = []
    headings: list[str] = []  # not yet followed by prose
    skipped = 0  # level of the heading of the dropped section
    for raw in text.split("\n"):
        line = raw.strip()
        if not line or line[0] in "|}" or (line[0] == "!" and not _is_sentence(line)):
            continue
        if line[0] == line[-1] == "=":
            level = len(line) - len(line.lstrip("="))
            name = " ".join(line.strip("= ").replace(TEMPLATE_GAP, "").split())
            if skipped and level > skipped:
                continue
            skipped = level if name.lower() in ENDING else 0
            changed[SECTION] += skipped > 0
            headings = [] if skipped or not name else [name]
            continue
        if skipped:
            continue
        if line[0] in "*#:;":
            line = line.lstrip("*#:; ")
            if not _is_sentence(line):
                if FORMULA_GAP in line:
                    changed[NO_FORMULA] += 1
                elif any(map(str.isalpha, line)):
                    changed[LIST_ITEM] += 1
                continue
        if TEMPLATE_GAP in line or FORMULA_GAP in line:
            line = _without_gaps(line, changed)
        if not any(map(str.isalpha, line)):
            continue
        kept += [*headings, line]
        headings = []
    return "\n".join(kept)


def _is_sentence(line: str) -> bool:
    """Whether a line has the end and the length of a sentence; two characters of a script without spaces count as a word."""
    end = line.rstrip(CLOSING + TEMPLATE_GAP)[-1:]
    if end not in (".", "!", "?", "…") and end not in SCRIPT_TERMINALS:
        return False
    words = line.count(" ") + 1
    if words < LIST_WORDS and not line.isascii():
        words += sum(map(writes_without_spaces, line)) // 2
    return words >= LIST_WORDS


def _without_gaps(line: str, changed: Counter[str]) -> str:
    """The line without sentences that contain a gap. A template directly after a sentence counts as a footnote and is
    dropped alone."""
    line, footnotes = FOOTNOTE.subn("", line)
    changed[AS_FOOTNOTE] += footnotes
    if not any(map(str.isalpha, line)):
        changed[NO_FORMULA] += FORMULA_GAP in line
        return ""
    left = []
    # a letter before a gap, since a sentence may begin or end with it
    for sentence in sentences.split(GLUED_END.sub(r"\1 ", GAP.sub(r"A\g<0>", line))):
        if gap := GAP.search(sentence):
            changed[GAPS[gap[0]]] += 1
        else:
            left.append(sentence)
    return " ".join(left)
