"""Style of the page: light and dark, a phone and a desktop, paper. Colours are Okabe and Ito's, darker or lighter for contrast."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --quiet: #57606a; --paper: #fff; --card: #f6f8fa; --edge: #d0d7de;
  --grid: #e4e8ec; --good: #00684b; --bad: #a33c00; --mark: #fff2c6;
  --c0: #0072b2; --c1: #d55e00; --c2: #00795a; --c3: #a4317f; --c4: #7a5f00; --c5: #444; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --quiet: #9ba6b2; --paper: #0f1318; --card: #181d24;
  --edge: #343b45; --grid: #262c35; --good: #4fd1a5; --bad: #ff9d66; --mark: #4a3f12;
  --c0: #5ab4ef; --c1: #f08c3a; --c2: #35c493; --c3: #e58fc6; --c4: #e3cf4a; --c5: #c9d1d9; } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; color: var(--ink);
  background: var(--paper); max-width: 76rem; margin: 0 auto; padding: 1.25rem 1rem 4rem; overflow-wrap: break-word }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--edge) }
h3 { font-size: 1rem; margin: 1.25rem 0 .4rem; overflow-wrap: anywhere }
p { margin: .4rem 0 } .quiet, caption { color: var(--quiet) } a { color: var(--c0) }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .75rem 0 }
.missing { border-left: 4px solid var(--bad); padding: .25rem .75rem; background: var(--card) } .missing ul { margin: 0; padding-left: 1rem }
.table { width: fit-content; max-width: 100%; margin: .5rem 0; border: 1px solid var(--edge); border-radius: 6px }
.table p { margin: 0; padding: .4rem .7rem; font-size: .92rem } .scroll { overflow-x: auto }
.scroll:focus-visible { outline: 2px solid var(--c0) }
table { border-collapse: collapse; width: 100%; font-size: .92rem }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top; border-top: 1px solid var(--edge) }
thead th { border-top: 0; background: var(--card); white-space: nowrap } tbody th { font-weight: 500 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td.wrap { overflow-wrap: anywhere; min-width: 6.5rem } td code, th code { overflow-wrap: anywhere }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, "Liberation Mono", monospace }
caption { text-align: left; padding: .4rem .7rem; font-size: .92rem }
details { margin: .5rem 0 } summary { cursor: pointer; color: var(--quiet) }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .6rem; margin: 1rem 0 }
.tiles div { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: .5rem .75rem }
.tiles dt { color: var(--quiet); font-size: .85rem } .tiles dd { margin: 0; font-size: 1.2rem; font-variant-numeric: tabular-nums }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1rem }
figure { margin: 0; min-width: 0; border: 1px solid var(--edge); border-radius: 6px; padding: .6rem .6rem .3rem }
figcaption { font-weight: 600; font-size: .95rem } figcaption small { display: block; font-weight: 400; color: var(--quiet) }
figure details { font-size: .85rem; margin: .2rem 0 } figure .table { margin: .3rem 0 } figure .table p { display: none } figure th, figure td { padding: .2rem .45rem }
svg { display: block; width: 100%; height: auto; overflow: visible }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; fill: var(--quiet) }
svg .end { text-anchor: end } svg .middle { text-anchor: middle } svg .grid { stroke: var(--grid) } svg .axis { stroke: var(--quiet) }
svg path { fill: none; stroke-width: 1 } svg .line { stroke-width: 1.5; stroke: currentColor; stroke-linejoin: round }
svg .held { stroke-width: 2; stroke: currentColor; stroke-dasharray: 5 4 } svg path.mark { fill: currentColor; stroke: var(--paper); stroke-width: .8 }
svg .event path { stroke: var(--quiet); stroke-dasharray: 2 3 } svg .spike { fill: var(--bad) }
svg text.run { font-weight: 700; fill: currentColor }
.c0 { color: var(--c0) } .c1 { color: var(--c1) } .c2 { color: var(--c2) } .c3 { color: var(--c3) } .c4 { color: var(--c4) } .c5 { color: var(--c5) }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; padding: 0; margin: .25rem 0 .75rem }
.legend li { display: flex; align-items: center; gap: .4rem; min-width: 0; overflow-wrap: anywhere } .legend svg { width: 34px; flex: none } .legend b { color: inherit }
.sample { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: .6rem .8rem; line-height: 1.9; overflow-wrap: anywhere }
.sample mark { background: var(--mark); color: inherit; border-bottom: 2px solid var(--bad); border-radius: 3px; padding: .1rem .25rem; white-space: nowrap } .sample sub { font-weight: 700; margin-left: .2em; line-height: 0 }
.piece { white-space: nowrap } .right { color: var(--good); font-weight: 600 } .wrong { color: var(--bad); font-weight: 600 }
.bars { max-width: 36rem } .bars th, .bars td { padding: .05rem .7rem; border: 0; white-space: nowrap } .bars .bar { display: block; height: .7rem; background: var(--c0); min-width: 1px } .bars td:last-child { width: 50%; min-width: 6rem }
@media (max-width: 30rem) { .scroll th, .scroll td { padding: .3rem .4rem } td.wrap { min-width: 5.6rem } }
@media print { :root { color-scheme: light; --ink: #000; --quiet: #444; --paper: #fff; --card: #fff; --edge: #aaa; --grid: #ddd; --good: #00684b; --bad: #a33c00; --mark: #fff2c6;
  --c0: #0072b2; --c1: #d55e00; --c2: #00795a; --c3: #a4317f; --c4: #7a5f00; --c5: #444 }
  body { max-width: none; padding: 0; font-size: 10pt } nav, summary { display: none } details::details-content { content-visibility: visible; display: block; height: auto }
  .charts { grid-template-columns: 1fr 1fr } figure, .sample, tr { break-inside: avoid } h2, h3 { break-after: avoid } .scroll { overflow: visible } .table { border: 0 } figure details { display: none } }
"""
