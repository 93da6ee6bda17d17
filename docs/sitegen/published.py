"""The page of published bounds: which are in, from the registry, and which are left out and why."""

import re
from typing import NamedTuple

from lipbound import bounds
from lipbound.schema import NORMS

REASONS = {
    "another map": "it bounds a map that no softmax head of a checkpoint is",
    "another norm": "it is stated in a norm that nothing here is measured in",
    "no constant": "it states no constant for a head at an input",
    "contained": "a column contains it",
    "text not found": "what it needs could not be read",
}
"""Why a statement is left out."""


class LeftOut(NamedTuple):
    """A statement that is no column: where it is found, what it says, and why it is left out, one
    of `REASONS`, with a remark."""

    source: str
    says: str
    reason: str
    remark: str


LEFT_OUT = (
    LeftOut(
        "Kim, Papamakarios, Mnih 2021, Theorem 3.2 in the largest-entry norm (arXiv:2006.04710)",
        "(4 phi^-1(N-1) + (D/H)^(-1/2)) ||W_O^T|| max_h ||W_Q|| ||W_Q^T|| max_h ||W_V^T||, norms "
        "of largest entries, L2 attention",
        "another norm",
        "recalled; the same theorem in the l2 norm is `kim`, beside the exact norm of its own map",
    ),
    LeftOut(
        "Qi, Wang, Chen, Shi, Zhang 2023, LipsFormer, Theorem 1 (arXiv:2304.09856); sharper in "
        "Nair 2025, Theorem 2 (arXiv:2510.23012)",
        "2N(N-1) nu tau eps^(-1/2) ||W_K|| + 2(N-1) nu tau eps^(-1/2) ||W_Q|| + 2N nu eps^(-1/2) "
        "||W_V||, scaled cosine attention",
        "another map",
        "queries, keys and values are normalised, with eps > 0, as in no checkpoint known to us; "
        "at eps = 1e-6 it is a thousand times the weights",
    ),
    LeftOut(
        "Large, Liu, Huh, Bahng, Isola, Bernstein 2024, modular norm (arXiv:2405.14813)",
        "functional attention at scale 1/d has sensitivity 1 for unit queries, keys and values",
        "contained",
        "`newhouse` at unit norms; the statement is recalled, the code of jxbz/modula was read",
    ),
    LeftOut(
        "Newhouse et al. 2025, whole networks (arXiv:2507.13338)",
        "residual blocks (1 - alpha) L + alpha L L_att, GeLU / 1.1289, attention times 1/3",
        "another map",
        "their networks mix and shrink branches so; the factor of attention is `newhouse`, "
        "without the 1/3",
    ),
    LeftOut(
        "Emadi 2026, Theorem 5.1 (arXiv:2602.18849)",
        "||W_O|| sum_h (||W_V^h|| + theta_h / tau Phi_h) for a layer, every token moving, theta = "
        "4 max_S p(S) (1 - p(S))",
        "text not found",
        "quoted by others, without what Phi_h stands for; `mass_splitting` is a bound of that form "
        "of ours, and Lemma 104 says for which Phi_h the form is true",
    ),
    LeftOut(
        "Emadi 2026, Theorem 5.2 (arXiv:2602.18849)",
        "(1 + Lip(LN) L_MHA) (1 + Lip(LN) L_FFN) for a block that normalises before both",
        "another map",
        "with the MLP, which no map here has; quoted by others. The first factor is what maps with "
        "a residual connection make of a bound, at the norm of the normalisation at the input",
    ),
    LeftOut(
        "Emadi 2026, Lemma 3.3 (arXiv:2602.18849)",
        "the root mean square of LN(x) is at most max |gamma| + max |beta|",
        "contained",
        "quoted by others; the largest length itself is that of Lemma 23",
    ),
    LeftOut(
        "Baek 2026 (AISTATS; arXiv:2510.21770)",
        "a first-order bound on the errors of a forward pass in low precision, from kappa_softmax, "
        "chi_score, kappa_val and rho_LN of every layer",
        "no constant",
        "of rounding errors, not of a head in its input; the four are extras of a run, by the "
        "definitions of the released code",
    ),
    LeftOut(
        "Budzinskiy, Fang, Zeng, Petersen 2026, Numerical stability analysis of large language "
        "models (arXiv:2503.10251v2)",
        "bounds on the local Lipschitz constant of self-attention that do not depend on the "
        "number of tokens",
        "text not found",
        "only the abstracts of both versions",
    ),
    LeftOut(
        "Ramapuram et al. 2025, sigmoid attention (arXiv:2409.04431)",
        "a bound on the Jacobian of attention with sigmoids of scores in place of the softmax",
        "another map",
        "no rows that sum to one; such heads are measured by automatic differentiation, and the "
        "run names them so; abstract alone was read",
    ),
    LeftOut(
        "Mudarisov, Burtsev, Petrova, Radu 2025 (arXiv:2508.17821)",
        "which tokens a softmax can tell apart as there are more of them, and a bound on its "
        "gradient, min(1/(4T), sqrt 2) at temperature T",
        "no constant",
        "of a softmax row, not of a head; second hand, and as a bound on the spectral norm it "
        "would be false: a row (1/2, 1/2) has 1/(2T)",
    ),
    LeftOut(
        "Lipschitz Continuity in Deep Learning: A Systematic Review of Theoretical Foundations, "
        "Estimation Methods, Regularization Approaches and Certifiable Robustness (TMLR, submitted "
        "in 2025; OpenReview pRZ0RKl11f)",
        "a survey of what is known of Lipschitz constants of networks",
        "no constant",
        "a reference to start from; abstract alone was read",
    ),
    LeftOut(
        "Havens, Araujo, Zhang, Hu 2024, LoFAST (ICML, PMLR 235)",
        "a local l2 constant of dot-product attention over a ball, from weights and the input "
        "at its centre",
        "text not found",
        "only the abstract; the published bound nearest to `lipbound.bounds.over_ball`",
    ),
    LeftOut(
        "Xu et al. 2023, OLSA; LipShiFT 2025 (arXiv:2503.14751); LRFormer 2023 "
        "(arXiv:2306.06849); LipAttn 2026; arXiv:2602.15503",
        "attention changed so that it is Lipschitz",
        "another map",
        "the maps are changed, and no softmax heads; abstracts alone were read",
    ),
    LeftOut(
        "Saratchandran, Lucey 2026 (arXiv:2603.07162)",
        "the condition number of the Jacobian of attention from those of Q, K and V",
        "no constant",
        "about its condition, not its norm; the abstract alone was read",
    ),
    LeftOut(
        "Calver 2026 (arXiv:2605.20868); Tzachristas 2025 (arXiv:2512.07647); Hossain 2025 "
        "(arXiv:2510.17098); Hariri 2025 (arXiv:2502.15075)",
        "errors of logits to total variation of rows, attention cut to its largest entries, "
        "perturbed and quantised keys and values",
        "no constant",
        "of rows under given errors, not of a head in its input; second hand but the last",
    ),
    LeftOut(
        "Alekseev 2026 (arXiv:2604.11890); Cowsik et al. 2024 (arXiv:2403.02579); Kan 2025 "
        "(arXiv:2510.09904); Ji 2025 (arXiv:2510.00345)",
        "averaged norms of Jacobians, Lyapunov exponents, where layer normalisation stands",
        "no constant",
        "averages over inputs or layers; abstracts alone were read",
    ),
    LeftOut(
        "Cesista 2025 (blog)",
        "sensitivity and sharpness of n-simplicial attention in the norm of every token",
        "another map",
        "more than two tokens meet in a score",
    ),
    LeftOut(
        "Nair 2025, Theorem 1 (arXiv:2510.23012)",
        "the softmax is 1/2-Lipschitz in every l_p, and 2 p (1 - p) locally in the largest-entry "
        "norm",
        "no constant",
        "of a softmax row, not of a head: `lipbound.attention.softmax.largest_entry_norm`",
    ),
    LeftOut(
        "Gupta, Verma 2023, CertViT (arXiv:2302.10287)",
        "certified radii from constants of layers",
        "another map",
        "L2 attention; the code returns NaN for dot-product attention",
    ),
    LeftOut(
        "Vuckovic, Baratin, Tachet des Combes 2020 and 2021 (arXiv:2007.02876, arXiv:2102.05628)",
        "attention as a map of measures, Lipschitz in Wasserstein distances",
        "no constant",
        "none for a head at an input was seen",
    ),
    LeftOut(
        "Geshkovski, Letrouit, Polyanskiy, Rigollet 2023 (arXiv:2305.05465); Castin, Ablin, "
        "Carrillo, Peyré 2025 (arXiv:2501.18322)",
        "dynamics of tokens under attention, in the limit of many layers",
        "no constant",
        "none for a head at an input was seen",
    ),
    LeftOut(
        "Shi et al. 2020 (arXiv:2002.06622); Bonaert et al. 2021, DeepT; Shi et al. 2024, GenBaB "
        "(arXiv:2405.21063); Vertex-Softmax 2026",
        "verification of networks over a set of inputs",
        "no constant",
        "they decide whether a radius is safe; Vertex-Softmax has the exact optimum of a "
        "softmax-weighted sum over a box of scores",
    ),
)  # fmt: skip


def cell(text: str) -> str:
    """Text in a cell of a table of Markdown."""
    return text.replace("|", "\\|")


def paper(key: str) -> str:
    """Authors, year and title of a source, from its BibTeX entry."""
    entry = bounds.BIBTEX[key].replace("{\\'e}", "é")
    fields = {
        name: " ".join(value.replace("{", "").replace("}", "").split())
        for name, value in re.findall(r"(\w+)\s*=\s*\{(.*?)\},?$", entry, re.M | re.S)
    }
    authors = ", ".join(author.split(",")[0] for author in fields["author"].split(" and "))
    where = re.search(r"arXiv:[\d.]+", fields.get("note", ""))
    return f"{authors} {fields['year']}, *{fields['title']}*" + (f" ({where[0]})" if where else "")


def columns(norm: str) -> list[str]:
    """The published bounds of a norm, as rows of a table; ours below them."""
    ours = bounds.get("lipbound").citation
    lines = [f"### Norm: {norm}", "", NORMS[norm][0].upper() + NORMS[norm][1:] + ".", ""]
    lines += [
        "| column | source | statement | a bound when | where it fails |",
        "|---|---|---|---|---|",
    ]
    for bound in (bounds.get(name) for name in bounds.names(norm)):
        if bound.citation != ours:
            source = f"{paper(bound.citation)}: {bound.source}"
            cells = [
                f"[`{bound.name}`]({bound.name}.md)",
                source,
                bound.statement_latex,
                bound.assumptions,
                bound.caveat or "never",
            ]
            lines.append(f"| {' | '.join(map(cell, cells))} |")
    lines = [*lines[:4], "No published bound is known to us."] if len(lines) == 6 else lines
    return [
        *lines,
        "",
        "Ours: "
        + ", ".join(f"`{name}`" for name in bounds.names(norm) if bounds.get(name).citation == ours)
        + ".",
        "",
    ]


def page() -> str:
    """The whole page."""
    assert {entry.reason for entry in LEFT_OUT} == set(REASONS)
    lines = ["# Published bounds: what is in, what is left out, and why", ""]
    lines += [
        "A run sets beside exact norms "
        "every published l2 bound on softmax heads that we know of. "
        "Bounds of one norm are compared among"
    ]
    lines += [
        "themselves only. What we prove in place of the printed statements is in [published "
        "bounds](../theory/published.md) and"
    ]
    lines += ["[bounds where tokens are told apart](../theory/token_bounds.md).", ""]
    lines += ["## What is in", ""]
    for norm in NORMS:
        lines += columns(norm)
    lines += ["## What is left out", "", "A statement is left out where"]
    lines[-1] += " " + "; ".join(f"{why} (*{reason}*)" for reason, why in REASONS.items()) + "."
    lines += ["", "| source | says | why | remark |", "|---|---|---|---|"]
    lines += [
        f"| {cell(one.source)} | {cell(one.says)} | {one.reason} | {cell(one.remark)} |"
        for one in LEFT_OUT
    ]
    lines += ["", "Where you know of another, please open an issue with the text of its statement."]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """The page, by its place on the site."""
    return {"bounds/published.md": page()}
