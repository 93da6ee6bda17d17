"use strict";
// Numbers arrive as data and leave as text: whatever a model or a data set is called, none of it is read as markup.
(async () => {
  const $ = (id) => document.getElementById(id);

  async function unpacked(id) {
    const packed = $(id).textContent.trim();
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    $(id).textContent = "";
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  if (typeof DecompressionStream === "undefined") {
    $("status").textContent = "This browser is too old to unpack the figures (it lacks DecompressionStream); the tables need nothing.";
    return;
  }
  const decoder = new TextDecoder();
  const runs = JSON.parse(decoder.decode(await unpacked("data")));
  const attention = await unpacked("attention-data");
  const library = document.createElement("script");
  library.textContent = decoder.decode(await unpacked("plotly"));
  document.head.append(library);

  let offset = 0;
  for (const run of runs)
    for (const layer of (run.details || []).filter(Boolean)) {
      const [heads, n, m] = layer.shape;
      layer.map = attention.subarray(offset, offset + heads * n * m);
      offset += heads * n * m;
    }

  const state = { run: 0, layer: 0, column: 0, bound: "", quantity: "value" };
  const real = (x) => (x === "inf" ? Infinity : x === "-inf" ? -Infinity : x);
  const log10 = (x) => (x === null || real(x) === Infinity || real(x) <= 0 ? null : Math.log10(x));
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const brief = (text) => (text.length > 12 ? text.slice(0, 11) + "\u2026" : text);
  const short = (text) => (text.length > 28 ? text.slice(0, 27) + "\u2026" : text);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // As many digits as an enclosure of this relative width supports, four at most; as in the tables.
  function number(x, width) {
    x = real(x);
    if (x === null || x === undefined) return "none";
    if (!Number.isFinite(x)) return "infinite";
    if (x === 0) return "0";
    const mantissa = Math.abs(x) / 10 ** Math.floor(Math.log10(Math.abs(x)));
    const digits = Math.max(1, Math.min(4, Math.floor(1 - Math.log10(Math.max(width, 1e-12) * mantissa))));
    const rounded = Number(x.toPrecision(digits));
    const exponent = Math.floor(Math.log10(Math.abs(rounded)));
    if (exponent >= -3 && exponent < 5)
      return rounded.toLocaleString("en-US", { minimumFractionDigits: Math.max(0, digits - 1 - exponent), maximumFractionDigits: Math.max(0, digits - 1 - exponent) });
    return x.toExponential(digits - 1).replace("e+", "e");
  }

  const layout = (extra) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("--fg"), size: 12, family: "system-ui, sans-serif" },
    margin: { l: 50, r: 15, t: 10, b: 40 }, showlegend: false, ...extra,
  });
  const axis = (extra) => ({ gridcolor: color("--line"), linecolor: color("--line"), zeroline: false, ...extra });
  const show = (id, data, figure) => Plotly.react(id, data, { ...figure, width: $(id).clientWidth }, { displaylogo: false, displayModeBar: false });
  // Meaning of the shares of tokens, by norm.
  const STEEPEST = {
    frobenius: "Moved: share of each token in the input direction that the head amplifies most; changes: in the output it moves",
    "every-token": "Every token moves by at most one, in the way that moves one output furthest. Moved: share of each token; changes: the output",
    "one-token": "One token moves by one, in the way that moves all outputs furthest. Moved: which; changes: share of each output",
  };
  const SHOWN = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
  const suffix = (k) => (k === 0 ? "" : String(k + 1));

  const current = () => runs[state.run];
  const exactOf = (run, name) => run.compared[name] || name;
  const valued = (run) => state.quantity === "value" || !run.bounds.length;
  const panelsShown = (run) => (valued(run) ? run.panels : run.bounds);
  const grid = (run, name) => (valued(run) ? run.grids : run.ratios)[name];

  // Ticks of a logarithmic axis from its ends (log10), as plain numbers: powers of ten, 1-2-5, or even steps, whichever the range has room for.
  function ticks(low, high, most) {
    const span = high - low, found = [];
    if (span >= 2.5) {
      const step = Math.ceil(span / most);
      for (let e = Math.ceil(low); e <= high; e += step) found.push(e);
    } else if (span >= 0.7) {
      for (let e = Math.floor(low); e <= high; e++) for (const k of [1, 2, 5]) found.push(e + Math.log10(k));
    } else {
      const from = 10 ** low, to = 10 ** high, raw = (to - from) / most, power = 10 ** Math.floor(Math.log10(raw || 1e-3));
      const step = power * [1, 2, 5, 10].find((k) => k * power >= raw);
      for (let k = Math.ceil(from / step); k * step <= to; k++) if (k > 0) found.push(Math.log10(k * step));
    }
    const kept = found.filter((x) => x >= low - 1e-9 && x <= high + 1e-9);
    const text = (x) => (x >= 5 || x <= -4 ? (Number.isInteger(x) ? `10<sup>${x}</sup>` : (10 ** x).toExponential(0).replace("e+", "e")) : Number((10 ** x).toPrecision(4)).toLocaleString("en-US", { maximumSignificantDigits: 4 }));
    return { tickmode: "array", tickvals: kept, ticktext: kept.map(text) };
  }

  // Panels that share a colour bar: those near the exact constant and the others; ratios share one.
  function sections(run) {
    const shown = panelsShown(run);
    if (valued(run)) return run.scales;
    const logs = shown.flatMap((name) => grid(run, name).flat().map(log10)).filter((x) => x !== null).sort((a, b) => a - b);
    return [{ names: shown, low: 0, high: logs.length ? logs[Math.floor(0.9 * (logs.length - 1))] : 1, colors: "Cividis" }];
  }

  function maps() {
    const run = current(), shown = panelsShown(run), parts = sections(run), wide = run.columns.length, high = run.layers.length;
    const total = Math.max(300, $("maps").clientWidth), across = Math.max(1, Math.min(shown.length, Math.floor(total / 210)));
    const cell = Math.min(total / across, 480), side = cell - 50;
    const strip = Math.max(34, Math.min(side * 0.45, 3 * side * high / wide)); // cells at most three times as high as wide: one layer is a strip
    const height = Math.min(Math.max(side * high / wide, strip), side * 1.2), row = height + 62, foot = 64;
    const whole = parts.reduce((sum, part) => sum + Math.ceil(part.names.length / across) * row + foot, 0);
    const data = [], annotations = [], shapes = [];
    const figure = layout({ height: whole, margin: { l: 0, r: 0, t: 0, b: 0 }, annotations, shapes });
    let start = 0;
    parts.forEach((part, index) => {
      const range = part.high > part.low ? [part.low, part.high] : [part.low - 0.5, part.low + 0.5], axisName = "coloraxis" + suffix(index);
      part.names.forEach((name, k) => {
        const place = { left: (k % across) * cell + 34, top: start + Math.floor(k / across) * row + 38, side, height, total, whole };
        panel(run, name, data, figure, place, range, axisName);
      });
      start += Math.ceil(part.names.length / across) * row + foot;
      figure[axisName] = { colorscale: part.colors[0].toUpperCase() + part.colors.slice(1), cmin: range[0], cmax: range[1], colorbar: {
        orientation: "h", thickness: 10, len: 0.6, x: 0.5, xanchor: "center", y: 1 - (start - 34) / whole, yanchor: "top", outlinewidth: 0,
        tickfont: { size: 11 }, ...ticks(range[0], range[1], 6),
      } };
    });
    show("maps", data, figure).then((element) => {
      if (element.listening) return;
      element.listening = true;
      const at = (event) => {
        const point = event.points[0], name = panelsShown(current())[point.curveNumber];
        return { name, layer: point.y, column: point.x };
      };
      element.on("plotly_hover", (event) => { const p = at(event); tell(p.name, p.layer, p.column); });
      element.on("plotly_unhover", () => tell(state.bound, state.layer, state.column));
      element.on("plotly_click", (event) => { const p = at(event); choose({ layer: p.layer, column: p.column, bound: current().bounds.includes(p.name) ? p.name : state.bound }); });
    });
    $("maps-note").textContent = (parts.length > 1 ? "Panels are read off the colour bar below them. " : "") + "Scales are logarithmic" +
      (run.across === "head" ? (run.samples > 1 ? `; every cell is the ${run.reduce} over ${run.samples} samples. ` : "; there is one sample. ") : "; every cell is one sample. ") +
      (run.exactSamples < run.samples ? `Exact constants and ratios are of ${run.exactSamples} of the samples. ` : "") +
      "Click a cell, or move with the arrow keys.";
  }

  function panel(run, name, data, figure, place, range, coloraxis) {
    const s = suffix(data.length), values = grid(run, name), { left, top, side, height, total, whole } = place;
    const x = [left / total, (left + side) / total], y = [1 - (top + height) / whole, 1 - top / whole];
    const known = values.flat().filter((v) => v !== null), logs = known.map((v) => (real(v) === Infinity ? Infinity : Math.log10(real(v))));
    const beyond = known.length && logs.every((v) => v > range[1]) ? "above" : known.length && logs.every((v) => v < range[0]) ? "below" : "";
    data.push({
      type: "heatmap", z: values.map((r) => r.map((v) => (real(v) === Infinity ? range[1] + 1 : log10(v)))), xaxis: "x" + s, yaxis: "y" + s,
      coloraxis, hoverongaps: false, text: values.map((r, i) => r.map((_, j) => escaped(sentence(run, name, i, j)).replace(/; /g, "<br>"))),
      hovertemplate: "%{text}<extra></extra>",
    });
    // the colour of an infinite value is that of the largest finite one
    if (!beyond) values.forEach((r, i) => r.forEach((v, j) => {
      if (real(v) === Infinity) figure.annotations.push({ text: "\u221e", x: j, y: i, xref: "x" + s, yref: "y" + s, showarrow: false, font: { size: 12, color: "#000" } });
    }));
    const numbers = (labels) => {
      const step = Math.max(1, Math.ceil(labels.length / 6)), at = labels.map((_, i) => i).filter((i) => i % step === 0);
      return { tickvals: at, ticktext: at.map((i) => String(labels[i])), tickfont: { size: 10 }, showgrid: false, zeroline: false, fixedrange: true };
    };
    figure["xaxis" + s] = { domain: x, anchor: "y" + s, ...numbers(run.columns) };
    figure["yaxis" + s] = { domain: y, anchor: "x" + s, autorange: false, range: [run.layers.length - 0.5, -0.5], ...numbers(run.layers) };
    figure.annotations.push({
      text: escaped(short(run.labels[name])) + (run.marks[name] ? " " + run.marks[name] : ""), x: (x[0] + x[1]) / 2, y: y[1], xref: "paper", yref: "paper", xanchor: "center", yanchor: "bottom", showarrow: false,
      font: { size: 12, color: name === state.bound ? color("--accent") : color("--fg") },
    });
    if (beyond)
      figure.annotations.push({ text: `${beyond} the scale`, x: (x[0] + x[1]) / 2, y: y[0] + 4 / whole, xref: "paper", yref: "paper", xanchor: "center", yanchor: "bottom", showarrow: false, font: { size: 11, color: beyond === "above" ? "#000" : "#fff" } });
    figure.shapes.push({
      type: "rect", xref: "x" + s, yref: "y" + s, x0: state.column - 0.5, x1: state.column + 0.5, y0: state.layer - 0.5, y1: state.layer + 0.5,
      line: { color: "#ff4f1f", width: 2.5 },
    });
    if (name === state.bound)
      figure.shapes.push({ type: "rect", xref: "paper", yref: "paper", x0: x[0], x1: x[1], y0: y[0], y1: y[1], line: { color: color("--accent"), width: 2 } });
  }

  function sentence(run, name, i, j) {
    const exactName = exactOf(run, name), exact = run.grids[exactName][i][j], value = run.grids[name][i][j];
    const words = [`layer ${run.layers[i]}, ${run.across} ${run.columns[j]}`];
    if (name in run.extras) return `${words[0]}; ${run.labels[name].toLowerCase()} ${number(value, run.extras[name])}`;
    const w = run.widths[exactName][i][j] === null ? 0 : Math.min(10, real(run.widths[exactName][i][j]));
    const upper = exactName === "exact" && run.upper ? run.upper[i][j] : null;
    words.push(`${run.labels[exactName].toLowerCase()} ${number(scaled(exact, 1 + w / 2), w)}` + ends(exact, upper));
    if (name !== exactName) {
      words.push(`${run.labels[name]} ${number(value, run.slack)}` + (run.exactSamples < run.samples && run.across === "head" ? ` (over all ${run.samples} samples)` : ""));
      words.push(`ratio ${number(scaled(run.ratios[name][i][j], (1 + w / 2) / (1 + w)), w)}`);
    }
    return words.join("; ");
  }
  const scaled = (x, factor) => (typeof x === "number" ? x * factor : x);
  const ends = (lower, upper) => {
    if (upper === null) return "";
    return precise(lower) === precise(upper) ? ` (${precise(lower)} to six digits)` : ` (between ${precise(lower)} and ${precise(upper)})`;
  };
  const precise = (x) => (x === null ? "not computed" : real(x) === Infinity ? "infinity" : Number(x).toPrecision(6).replace(/e\+?/, "e"));

  function tell(name, i, j) {
    const run = current();
    $("status").textContent = sentence(run, name, i, j);
    Object.assign($("status").dataset, {
      bound: name, layer: run.layers[i], column: run.columns[j], exact: run.grids[exactOf(run, name)][i][j], value: run.grids[name][i][j],
      ratio: run.bounds.includes(name) ? run.ratios[name][i][j] : 1,
    });
  }

  function histogram() {
    const run = current(), h = run.histograms[state.bound];
    if (!h) return;
    document.querySelectorAll(".bound-label").forEach((e) => { e.textContent = run.labels[state.bound]; });
    const middle = h.counts.map((_, i) => (h.edges[i] + h.edges[i + 1]) / 2), widths = h.counts.map((_, i) => h.edges[i + 1] - h.edges[i]);
    show("histogram", [{
      type: "bar", x: middle, y: h.counts, width: widths, marker: { color: color("--link") },
      hovertext: h.counts.map((c, i) => `${c} between ${number(10 ** h.edges[i], 0.01)} and ${number(10 ** h.edges[i + 1], 0.01)}`), hovertemplate: "%{hovertext}<extra></extra>",
    }], layout({
      height: 240, bargap: 0, xaxis: axis({ title: { text: "bound / exact" }, fixedrange: true, ...(h.edges.length ? ticks(h.edges[0], h.edges[h.edges.length - 1], 8) : {}) }), yaxis: axis({ title: { text: run.across === "head" ? "heads x samples" : "layers x samples" }, fixedrange: true }),
      shapes: [{ type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, line: { color: color("--accent"), dash: "dot" } }],
    }));
    const sum = h.counts.reduce((a, b) => a + b, 0);
    $("histogram-note").textContent = `${sum} values of ${run.labels[state.bound]} over the exact constant` + (h.infinite ? `, and ${h.infinite} infinite ones` : "") + ". Left of the dotted line it is below what it should bound.";
  }

  function samples() {
    const run = current(), i = state.layer, j = state.column, exactName = exactOf(run, state.bound);
    const pick = (name) => (run.across === "head" ? run.values[name].map((s) => real(s[i][j])) : [real(run.values[name][i][j])]);
    const exact = pick(exactName), bound = pick(state.bound), numbers = run.across === "head" ? exact.map((_, s) => s) : [run.columns[j]];
    const trace = (name, y, extra) => ({
      type: "scatter", mode: "markers", name: escaped(name), x: numbers, y, hovertemplate: "sample %{x}: %{y:.5g}<extra>%{fullData.name}</extra>", ...extra,
    });
    show("samples", [
      trace(run.labels[exactName], exact, { marker: { color: color("--fg"), size: 8 } }), trace(run.labels[state.bound], bound, { marker: { color: color("--accent"), size: 8, symbol: "triangle-down" } }),
    ].slice(0, exactName === state.bound ? 1 : 2), layout({
      height: 300, showlegend: true, legend: { orientation: "h", y: 1.12 }, margin: { l: 60, r: 15, t: 30, b: 40 },
      xaxis: axis({ title: { text: "sample" }, dtick: numbers.length > 8 ? undefined : 1, fixedrange: true }), yaxis: axis({ type: "log", fixedrange: true, exponentformat: "power" }),
    }));
  }

  function word(run, t) {
    return run.tokens.length ? `${t} "${run.tokens[t]}"` : `token ${t}`;
  }

  function detail() {
    const run = current();
    $("detail-title").textContent = `layer ${run.layers[state.layer]}, ${run.across} ${run.columns[state.column]}`;
    samples();
    const layer = run.details && run.details[state.layer], h = state.column;
    const there = layer && h < layer.shape[0];
    $("detail-reason").hidden = Boolean(there);
    $("detail-reason").textContent = there ? "" : `Attention, singular vectors and terms are not on this page: ${run.details ? (layer ? "this layer has fewer heads" : "this layer has no closed form, is cross-attention, or sees windows of the sample") : run.reason}.`;
    document.querySelectorAll(".needs-detail").forEach((e) => { e.hidden = !there; });
    if (!there) return;
    document.querySelectorAll(".sample").forEach((e) => { e.textContent = run.sample; });
    const [, n, m] = layer.shape, z = [], one = layer.map.subarray(h * n * m, (h + 1) * n * m);
    for (let i = 0; i < n; i++) z.push(Array.from(one.subarray(i * m, (i + 1) * m), (v) => (v / 255) ** 2));
    const labels = Array.from({ length: n }, (_, i) => escaped(layer.stride > 1 ? `tokens ${i * layer.stride} on` : word(run, i)));
    show("attention", [{
      type: "heatmap", z: z.map((r) => r.map(Math.sqrt)), customdata: z.map((r, i) => r.map((v, j) => [v.toPrecision(2), labels[i], labels[j]])), colorscale: "Cividis", zmin: 0, zmax: 1,
      colorbar: { title: { text: "probability", side: "right" }, thickness: 12, outlinewidth: 0, tickvals: SHOWN.map(Math.sqrt), ticktext: SHOWN.map(String) },
      hovertemplate: "%{customdata[1]} attends to %{customdata[2]}: %{customdata[0]}<extra></extra>",
    }], layout({
      height: 380, xaxis: axis({ title: { text: "key" + (layer.stride > 1 ? ` (squares of ${layer.stride} tokens, largest entry)` : "") }, showgrid: false }), yaxis: axis({ title: { text: "query" }, autorange: "reversed", showgrid: false }),
    }));
    const tokens = layer.right[h].map((_, t) => t), hover = tokens.map((t) => escaped(word(run, t)));
    const bars = (name, values, yaxis, c) => ({ type: "bar", name, x: tokens, y: values, yaxis, marker: { color: c }, customdata: hover, hovertemplate: "%{customdata}: %{y:.3g}<extra>" + name + "</extra>" });
    show("tokens", [
      bars("moved", layer.right[h], "y", color("--accent")), bars("changes", layer.left[h], "y2", color("--link")), bars("softmax norm", layer.softmax_norm[h], "y3", color("--soft")),
    ], layout({
      height: 380, margin: { l: 60, r: 15, t: 10, b: 40 }, xaxis: axis({ title: { text: "token" }, anchor: "y3" }),
      yaxis: axis({ domain: [0.7, 1], title: { text: "moved" } }), yaxis2: axis({ domain: [0.36, 0.64], title: { text: "changes" } }), yaxis3: axis({ domain: [0, 0.3], title: { text: "softmax" } }),
    }));
    const most = (values, count, said) => [...tokens].sort((a, b) => values[b] - values[a]).slice(0, count).map((t) => `${word(run, t)} (${said(values[t])})`).join(", ") + ".";
    $("tokens-note").textContent = `${STEEPEST[run.norm_name]}; softmax: norm of the softmax Jacobian of each row (at most 1/2). Most moved: ` + most(layer.right[h], 5, (x) => `${Math.round(100 * x)} %`);
    const room = Math.max(1, Math.floor(($("profile").clientWidth - 75) / 12)), step = Math.ceil(tokens.length / room), named = tokens.filter((t) => t % step === 0);
    const texts = run.tokens.length ? { tickmode: "array", tickvals: named, ticktext: named.map((t) => escaped(brief(run.tokens[t]))), tickangle: -90, tickfont: { size: 10 } } : {};
    show("profile", [bars("alone", layer.alone[h], "y", color("--accent")), bars("as output", layer.reached[h], "y2", color("--link"))], layout({
      height: 380, margin: { l: 60, r: 15, t: 10, b: run.tokens.length ? 80 : 40 }, xaxis: axis({ anchor: "y2", showgrid: false, ...(run.tokens.length ? {} : { title: { text: "token" } }), ...texts }),
      yaxis: axis({ domain: [0.54, 1], title: { text: "alone" }, rangemode: "tozero" }), yaxis2: axis({ domain: [0, 0.46], title: { text: "as output" }, rangemode: "tozero" }),
    }));
    $("profile-note").textContent = `Alone: how far all outputs go (Frobenius norm) when that token alone moves by one; as output: how far that output goes when all tokens move, by one in all (Frobenius norm). ${step > 1 && run.tokens.length ? "Not all tokens are named below. " : ""}Steepest alone: ` +
      most(layer.alone[h], 3, (x) => x.toPrecision(3));
    const rows = [["Exact", layer.parts], ...Object.entries(layer.bounds).map(([name, terms]) => [run.labels[name], terms])].reverse();
    const palette = { values: color("--link"), keys: color("--accent"), queries: "#8a6bd1", softmax: "#c58b2a", mixed: color("--soft") };
    show("terms", Object.keys(palette).map((term) => ({
      type: "bar", orientation: "h", name: term, y: rows.map((r) => escaped(r[0])), x: rows.map((r) => (r[1][term] ? r[1][term][h] : 0)), marker: { color: palette[term] },
      hovertemplate: "%{y}: %{x:.1%} " + term + "<extra></extra>",
    })).filter((t) => t.x.some((v) => v !== 0)), layout({
      height: Math.max(200, 90 + 24 * rows.length), barmode: "relative", showlegend: true, legend: { orientation: "h", y: 1, yanchor: "bottom" }, margin: { l: 160, r: 15, t: 60, b: 30 },
      xaxis: axis({ tickformat: ".0%", fixedrange: true }), yaxis: axis({ fixedrange: true, ticks: "", automargin: true }),
    }));
    $("terms-note").textContent = "Exact: how much of the norm passes through values (attention as it is), keys and queries (attention as it changes); parts may be negative." + (rows.length === 1 ? "" : " Bounds: values against softmax, of the bound (Yudin, Specformer) or of its square (Castin); those of lipbound at the top vector of their matrix of norms, for lipbound itself that of its first form, squared.");
  }

  function compareRuns() {
    const names = [...new Set(runs.flatMap((run) => run.bounds))], mean = (run, name) => {
      const row = run.summary.rows.find((r) => r[0] === name);
      return row ? Number(row[2].replace(/,/g, "")) || null : null;
    };
    const label = (name) => runs.find((run) => run.labels[name]).labels[name];
    if (runs.length < 2) return;
    $("compare").hidden = !names.length;
    if (!names.length) return;
    // Bounds that lie eight decades beyond all nearer ones leave the axis, and say where they are.
    const logs = (name) => runs.map((run) => mean(run, name)).filter((x) => x !== null && x > 0 && Number.isFinite(x)).map(Math.log10);
    let end = 0;
    for (const x of names.flatMap(logs).sort((a, b) => a - b)) if (x <= end + 8) end = Math.max(end, x);
    const beyond = names.filter((n) => logs(n).some((x) => x > end));
    show("compare", runs.map((run, k) => ({
      type: "scatter", mode: "markers", name: escaped(short(run.title)), y: names.map((n) => escaped(short(label(n)))), x: names.map((n) => { const x = mean(run, n); return x !== null && Math.log10(x) <= end ? x : null; }),
      marker: { size: 10, symbol: k, color: ["#0b7bd1", "#d1600b", "#7a4fd1", "#0f9d6b", "#c02f6d"][k % 5] }, hovertemplate: "%{y}: %{x:.4g}<extra>%{fullData.name}</extra>",
    })), layout({
      height: 60 + 26 * names.length + 22 * runs.length, showlegend: true, legend: { orientation: "h", y: 1, yanchor: "bottom" }, margin: { l: 150, r: 15, t: 10 + 22 * runs.length, b: 40 },
      annotations: beyond.map((n) => ({
        text: `beyond: ${number(10 ** Math.min(...logs(n).filter((x) => x > end)), 0.1)}`, x: 1, xref: "paper", xanchor: "right", y: escaped(short(label(n))), showarrow: false, font: { size: 11 },
      })),
      xaxis: axis({ type: "log", title: { text: "bound / exact" }, exponentformat: "power", fixedrange: true, nticks: 6 }), yaxis: axis({ type: "category", autorange: "reversed", fixedrange: true, automargin: true }),
    }));
  }

  function options(id, items, chosen) {
    $(id).replaceChildren(...items.map(([value, text]) => {
      const option = document.createElement("option");
      option.value = value;
      option.textContent = text;
      option.selected = String(value) === String(chosen);
      return option;
    }));
  }

  function controls() {
    const run = current();
    options("bound", run.bounds.map((name) => [name, run.labels[name]]), state.bound);
    options("layer", run.layers.map((l, i) => [i, l]), state.layer);
    options("column", run.columns.map((c, j) => [j, c]), state.column);
    document.querySelectorAll(".across").forEach((e) => { e.textContent = run.across; });
    document.querySelector(".across-label").textContent = run.across[0].toUpperCase() + run.across.slice(1);
    document.querySelectorAll(".needs-bounds").forEach((e) => { e.hidden = !run.bounds.length; });
    document.querySelectorAll(".run").forEach((e) => { e.hidden = Number(e.dataset.run) !== state.run; });
  }

  function choose(change) {
    Object.assign(state, change);
    const run = current();
    if (!run.bounds.includes(state.bound)) state.bound = run.bounds.includes("lipbound") ? "lipbound" : run.bounds[0] || "exact";
    state.layer = Math.max(0, Math.min(run.layers.length - 1, state.layer));
    state.column = Math.max(0, Math.min(run.columns.length - 1, state.column));
    draw();
  }

  function draw() {
    controls();
    maps();
    histogram();
    detail();
    tell(state.bound, state.layer, state.column);
    scrolls();
  }

  // Begin at the steepest head.
  const first = current().grids.exact;
  let best = -1;
  first.forEach((row, i) => row.forEach((v, j) => { if (v !== null && real(v) > best) { best = real(v); state.layer = i; state.column = j; } }));
  $("quantity").addEventListener("change", (e) => choose({ quantity: e.target.value }));
  $("bound").addEventListener("change", (e) => choose({ bound: e.target.value }));
  $("layer").addEventListener("change", (e) => choose({ layer: Number(e.target.value) }));
  $("column").addEventListener("change", (e) => choose({ column: Number(e.target.value) }));
  if ($("run")) $("run").addEventListener("change", (e) => choose({ run: Number(e.target.value) }));
  $("maps").addEventListener("keydown", (e) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (moves[e.key]) {
      e.preventDefault();
      choose({ layer: state.layer + moves[e.key][0], column: state.column + moves[e.key][1] });
    } else if (e.key === "b" || e.key === "B") {
      const names = current().bounds.length ? current().bounds : ["exact"], k = names.indexOf(state.bound) + (e.key === "b" ? 1 : names.length - 1);
      choose({ bound: names[k % names.length] });
    }
  });
  const scrolls = () => document.querySelectorAll(".scroll").forEach((e) => { e.classList.toggle("overflows", e.scrollWidth > e.clientWidth + 1); });
  const redraw = () => { compareRuns(); draw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { document.body.classList.add("printed"); redraw(); });
  addEventListener("afterprint", () => { document.body.classList.remove("printed"); redraw(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  compareRuns();
  choose({});
  document.documentElement.dataset.ready = "true";
})().catch((error) => {
  document.getElementById("status").textContent = `The figures could not be drawn: ${error}`;
  throw error;
});
