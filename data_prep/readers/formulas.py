"""Formulas of TeX as a line of text."""

from __future__ import annotations

import re

from data_prep.readers.inline_templates import RAISABLE, RAISED, by_name

# most characters of a formula whose text is kept
LONGEST = 200
_SYMBOLS = by_name((
    ("α", "alpha"), ("β", "beta"), ("γ", "gamma"), ("δ", "delta"), ("ε", "epsilon|varepsilon"), ("ζ", "zeta"), ("η", "eta"), ("θ", "theta"),
    ("κ", "kappa"), ("λ", "lambda"), ("μ", "mu"), ("ν", "nu"), ("ξ", "xi"), ("π", "pi"), ("ρ", "rho"), ("σ", "sigma"), ("τ", "tau"),
    ("φ", "phi|varphi"), ("χ", "chi"), ("ψ", "psi"), ("ω", "omega"), ("Γ", "Gamma"), ("Δ", "Delta"), ("Θ", "Theta"), ("Λ", "Lambda"),
    ("Π", "Pi"), ("Σ", "Sigma"), ("Φ", "Phi"), ("Ψ", "Psi"), ("Ω", "Omega"), ("×", "times"), ("·", "cdot"), ("÷", "div"), ("±", "pm"),
    ("≤", "le|leq"), ("≥", "ge|geq"), ("≠", "ne|neq"), ("≈", "approx"), ("~", "sim|thicksim"), ("≡", "equiv"), ("∞", "infty"), ("∈", "in"),
    ("⊂", "subset"), ("⊆", "subseteq"), ("∪", "cup"), ("∩", "cap"), ("∅", "emptyset"), ("→", "to|rightarrow"), ("⇒", "Rightarrow"),
    ("⇔", "Leftrightarrow|iff"), ("∀", "forall"), ("∃", "exists"), ("¬", "neg"), ("∧", "wedge|land"), ("∨", "vee|lor"), ("∂", "partial"),
    ("∇", "nabla"), ("∑", "sum"), ("∫", "int"), ("∏", "prod"), ("…", "ldots|dots|dotsc|dotsb|cdots"), ("°", "circ"), ("ℓ", "ell"),
    ("", "left|right|displaystyle|textstyle|big|Big|limits|mathrm|mathbf|mathit|mathcal|mathbb|mathfrak|boldsymbol|operatorname|text|mbox|rm|bf|ce"),
    ("sin", "sin"), ("cos", "cos"), ("tan", "tan"), ("log", "log"), ("ln", "ln"), ("exp", "exp"), ("lim", "lim"), ("max", "max"), ("min", "min"),
    (" ", "quad|qquad"),
))  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_FRACTION = re.compile(r"\\[dt]?frac *(?:\{([^{}\\]*)\}|(\d)) *(?:\{([^{}\\]*)\}|(\d))")
_BELOW = re.compile(r"_ *\{([^{}\\]*)\}")
_BAR = re.compile(r"\\bar *\{? *(\w) *\}?")
_ROOT = re.compile(r"\\sqrt *\{([^{}\\]*)\}")
_POWER = re.compile(r"\^ *(?:\{([^{}\\]*)\}|([^\s{}\\]))")


def _group(text: str) -> str:
    return text if re.fullmatch(r"[\w.]*", text) else f"({text})"


def _power(match: re.Match[str]) -> str:
    exponent = (match[1] or match[2] or "").strip()
    return exponent.translate(RAISED) if RAISABLE.fullmatch(exponent) else f"^{_group(exponent)}"


def _fraction(match: re.Match[str]) -> str:
    behind_number = match.string[: match.start()].rstrip()[-1:].isdigit()
    return f"{' ' * behind_number}{_group(match[1] or match[2])}/{_group(match[3] or match[4])}"


def formula(tex: str) -> str | None:
    """A short formula of TeX in one line of text, x² + α ≤ a/(b + c); None if it has no such form."""
    if len(tex) > LONGEST or "\\\\" in tex or "&" in tex:
        return None
    tex = re.sub(r"\\[,;:! ]|~", " ", tex).replace("\\{", "｛").replace("\\}", "｝").replace("\\%", "%")
    tex = _BAR.sub("\\1\u0304", _COMMAND.sub(lambda match: _SYMBOLS.get(match[1], match[0]), tex))
    tex = _POWER.sub(_power, tex)
    tex = _BELOW.sub(lambda match: f"_{_group(match[1])}", tex)
    tex = _ROOT.sub(lambda match: f"√{_group(match[1])}", tex)
    tex = _FRACTION.sub(_fraction, tex)
    tex = re.sub(r"\{([^{}\\]*)\}", r"\1", re.sub(r"\{([^{}\\]*)\}", r"\1", tex))
    if re.search(r"[\\{}]", tex):
        return None
    return " ".join(tex.replace("｛", "{").replace("｝", "}").split())
