"use strict";
// Draws the charts of a report from the numbers in #data. All runs share the axes of a chart and the colours of a metric.
const data = JSON.parse(document.getElementById("data").textContent);
const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const MOST_NODES_WITH_NUMBERS = 10;
const MARGIN = { left: 56, right: 22, top: 18, bottom: 22 };
const several = data.runs.length > 1;
const moving = []; // what follows the slider

// ---- elements and numbers ----

function svg(parent, tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return parent.appendChild(made);
}

function html(parent, tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return parent.appendChild(made);
}

function brief(value, digits = 2) {
  if (typeof value !== "number") return value ?? "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 0.01 && size < 99.95) return String(+value.toPrecision(digits));
  if (size >= 99.95 && size < 1e4) return value.toFixed(0);
  return value.toExponential(digits - 1).replace("+", "").replace(/\.0+e/, "e");
}

const finite = values => values.filter(value => typeof value === "number");
const thinned = (values, most) => values.filter((_, i) => i % Math.ceil(values.length / most) === 0);

// ---- scales: functions from numbers to pixels, with ticks ----

function scale(low, high, from, to, bend, ticks) {
  const [a, b] = [bend(low), bend(high)];
  const place = value => from + ((bend(value) - a) / (b - a)) * (to - from);
  const shown = []; // those of little size first: labels must not touch each other
  for (const tick of ticks.filter(tick => tick >= low && tick <= high).sort((s, t) => Math.abs(s) - Math.abs(t))) {
    if (shown.every(other => Math.abs(place(other) - place(tick)) > 15)) shown.push(tick);
  }
  return Object.assign(place, { ticks: shown });
}

function linear(low, high, from, to, count = 4) {
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(each => each * unit).find(each => each >= raw);
  const first = Math.ceil(low / step), ticks = [];
  for (let i = first; i * step <= high * (1 + 1e-9); i++) ticks.push(+(i * step).toPrecision(12));
  return scale(low, high, from, to, value => value, ticks);
}

function logarithmic(low, high, from, to) {
  const steps = high / low > 1000 ? [1] : [1, 2, 5], ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++) steps.forEach(each => ticks.push(+`${each}e${e}`));
  const seen = ticks.filter(tick => tick >= low && tick <= high);
  return scale(low, high, from, to, Math.log, thinned(seen, 5));
}

// linear between -threshold and threshold, logarithmic outside
function bothSigns(low, high, from, to, threshold) {
  const powers = [];
  for (let tick = threshold; tick <= Math.max(high, -low); tick *= 10) powers.push(+tick.toPrecision(3));
  const up = thinned(powers, 4), down = up.map(tick => -tick);
  return scale(low, high, from, to, value => Math.asinh(value / threshold), [...down, 0, ...up]);
}

function fitted(values, wantsLog) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (wantsLog && low > 0 && high > 4 * low) {
    return (from, to) => logarithmic(low / 1.15, high * 1.15, from, to);
  }
  const spare = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
  return (from, to) => linear(low - spare, high + spare, from, to);
}

const spanned = () => {
  const ends = data.runs.flatMap(run => run.steps);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const spare = 0.02 * (high - low) || 1;
  return (from, to) => linear(low - spare, high + spare, from, to, 5);
};

// ---- curves ----

// lines: [{ name, kind, points: [[step, value], …] }]
function chart(box, title, lines, fitY, alerts, height = 180) {
  const width = Math.max(230, box.clientWidth);
  const x = spanned()(MARGIN.left, width - MARGIN.right), y = fitY(height - MARGIN.bottom, MARGIN.top);
  const top = svg(box, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const tick of y.ticks) {
    svg(top, "line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) });
    svg(top, "text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, brief(tick, 3));
  }
  for (const tick of x.ticks.filter(Number.isInteger)) {
    svg(top, "text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, String(tick));
  }
  for (const step of new Set(alerts.map(alert => alert.step))) {
    svg(top, "line", { class: "alert", x1: x(step), x2: x(step), y1: MARGIN.top, y2: height - MARGIN.bottom });
    svg(top, "text", { class: "alert", x: x(step), y: MARGIN.top - 5, "text-anchor": "middle" }, "▲");
  }
  const cursor = svg(top, "line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  moving.push(step => {
    cursor.setAttribute("visibility", "visible");
    ["x1", "x2"].forEach(end => cursor.setAttribute(end, x(step)));
  });
  for (const { kind, points } of lines) {
    const known = points.filter(([, value]) => typeof value === "number" && Number.isFinite(y(value)));
    const path = known.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    svg(top, "path", { class: `curve ${kind}`, d: path });
    if (!kind && known.length <= 40) known.forEach(([s, v]) => svg(top, "circle", { class: "dot", cx: x(s), cy: y(v), r: 2.4 }));
  }
  const readout = html(box, "p", "\u00a0", "readout");
  const steps = [...new Set(lines.flatMap(line => line.points.map(([step]) => step)))];
  top.addEventListener("pointermove", event => {
    const at = ((event.clientX - top.getBoundingClientRect().left) / top.clientWidth) * width;
    const step = steps.reduce((best, each) => (Math.abs(x(each) - at) < Math.abs(x(best) - at) ? each : best), steps[0]);
    const values = lines.map(line => [line.name, line.points.find(([each]) => each === step)?.[1]]).filter(([, v]) => v != null);
    readout.textContent = `step ${step}: ` + values.map(([name, value]) => `${name} ${brief(value, 4)}`).join(", ");
  });
}

// all of them before anything is drawn: how wide they are depends on how many there are
function boxes(row) {
  row.classList.toggle("runs", several);
  return data.runs.map(run => [run, html(row, "div")]);
}

function charts() {
  const all = document.getElementById("charts");
  if (!all) return;
  all.replaceChildren();
  all.classList.toggle("alone", !several);
  for (const { key, title, log, meaning, good, bad } of data.charts) {
    const values = finite(data.runs.flatMap(run => (run.curves[key] ?? []).map(([, value]) => value)));
    if (!values.length) continue;
    const group = html(all, "div", "", "chart");
    html(group, "h4", title);
    for (const [run, box] of boxes(html(group, "div"))) {
      if (several) html(box, "p", run.name);
      if (run.curves[key]) chart(box, title, [{ name: "", kind: "", points: run.curves[key] }], fitted(values, log), run.alerts);
      else html(box, "p", "not measured");
    }
    if (meaning) html(group, "p", `${meaning}. Good: ${good}. Bad: ${bad}.`);
  }
}

function spectra() {
  const all = document.getElementById("spectra");
  if (!all) return;
  all.replaceChildren();
  const every = data.runs.flatMap(run => run.spectra);
  const values = finite(every.flatMap(each => [...each.top, each.smallest, each.ggn, each.limit]));
  const first = finite(every.map(each => each.top[0])).filter(value => value > 0);
  const [low, high] = [Math.min(...values, 0), Math.max(...values)], least = Math.min(...first);
  const fit = high <= 30 * least || !first.length
    ? fitted(values, false)
    : (from, to) => bothSigns(low * 1.2, high * 1.2, from, to, 10 ** (Math.floor(Math.log10(least)) - 1));
  for (const [run, box] of boxes(all)) {
    if (several) html(box, "h4", run.name);
    if (!run.spectra.length) { html(box, "p", "no spectrum was measured"); continue; }
    const over = read => run.spectra.map(each => [each.step, read(each)]);
    const count = Math.max(...run.spectra.map(each => each.top.length));
    const lines = [
      ...Array.from({ length: count - 1 }, (_, i) => ({ name: `λ${i + 2}`, kind: "others", points: over(each => each.top[i + 1]) })),
      { name: "smallest", kind: "smallest", points: over(each => each.smallest) },
      { name: "Gauss–Newton λ1", kind: "ggn", points: over(each => each.ggn) },
      { name: "stability limit", kind: "limit", points: over(each => each.limit) },
      { name: "λ1", kind: "", points: over(each => each.top[0]) },
    ].filter(line => finite(line.points.map(([, value]) => value)).length);
    chart(box, "eigenvalues", lines, fit, run.alerts, 280);
    legend(box, lines);
    const now = html(box, "p", "", "readout");
    moving.push(step => {
      const at = run.spectra.findLast(each => each.step <= step) ?? run.spectra[0];
      now.textContent = `step ${at.step}: ` + at.top.map((v, i) => `λ${i + 1} ${brief(v, 4)} ± ${brief(at.residuals[i])}`).join(", ");
    });
  }
}

function legend(box, lines) {
  const row = html(box, "p");
  const kinds = new Map(lines.map(line => [line.kind, line.kind === "others" ? "further top eigenvalues" : line.name]));
  for (const [kind, name] of [...kinds].reverse()) {
    const item = html(row, "span");
    item.style.cssText = "display:inline-flex;gap:0.3rem;align-items:center;margin-right:1rem";
    const line = svg(item, "svg", { viewBox: "0 0 26 8", style: "width:26px" });
    svg(line, "path", { class: `curve ${kind}`, d: "M0 4H26" });
    html(item, "span", name);
  }
}

// ---- heatmaps ----

function colours(metric) {
  const values = data.runs.flatMap(run => run.frames.flatMap(frame => frame.values[metric.name]));
  const numbers = finite(values), positive = numbers.filter(value => value > 0);
  let [low, high] = [metric.range[0], Math.max(metric.range[1], ...numbers)], bend = value => value;
  if (metric.log && positive.length) {
    [low, high] = [Math.min(...positive), Math.max(...positive)];
    if (positive.length < numbers.length) low /= Math.max(2, (high / low) ** 0.25);
    if (high < low * 1.01) [low, high] = [low / 1.1, high * 1.1];
    bend = Math.log;
  }
  const level = value => {
    if (typeof value !== "number") return value === "∞" ? 1 : 0;
    return Math.min(1, Math.max(0, (bend(Math.max(value, Number.MIN_VALUE)) - bend(low)) / (bend(high) - bend(low))));
  };
  return { low, high, level, isLog: bend === Math.log };
}

function viridis(level) {
  const place = level * (VIRIDIS.length - 1), i = Math.min(VIRIDIS.length - 2, Math.floor(place));
  const parts = [VIRIDIS[i], VIRIDIS[i + 1]].map(hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)));
  return `rgb(${parts[0].map((part, k) => Math.round(part + (place - i) * (parts[1][k] - part))).join(" ")})`;
}

function heatmap(box, run, frame, metric, map, framed) {
  const { names, shared } = frame, n = names.length;
  const longest = 6.4 * Math.max(...names.map(name => name.length)), left = longest + 10, slanted = 0.72 * longest + 16;
  const width = Math.max(230, box.clientWidth), side = Math.min(46, (width - left - 4) / n), wide = side * n;
  const top = svg(box, "svg", { viewBox: `0 0 ${width} ${wide + slanted}`, role: "img", "aria-label": `${metric.title}, step ${frame.step}` });
  const value = (i, j) => frame.values[metric.name][i * n - (i * (i - 1)) / 2 + j - i];
  for (let i = 0; i < n; i++) {
    svg(top, "text", { x: left - 6, y: (i + 0.5) * side + 4, "text-anchor": "end" }, names[i]);
    const [x, y] = [left + (i + 0.5) * side, wide + 12];
    svg(top, "text", { x, y, "text-anchor": "end", transform: `rotate(-45 ${x} ${y})` }, names[i]);
    for (let j = 0; j < n; j++) {
      const v = value(Math.min(i, j), Math.max(i, j)), level = map.level(v);
      const cell = { x: left + j * side, y: i * side, width: side - 1, height: side - 1 };
      const rect = svg(top, "rect", v == null ? { ...cell, class: "empty" } : { ...cell, fill: viridis(level) });
      svg(rect, "title", {}, `${frame.nodes[i]}, ${frame.nodes[j]}: ${brief(v, 4)}`);
      if (n <= MOST_NODES_WITH_NUMBERS) {
        const style = `fill:${v == null ? "inherit" : level < 0.6 ? "#fff" : "#000"};font-size:${Math.min(11, side / 3.4)}px;pointer-events:none`;
        svg(top, "text", { x: cell.x + (side - 1) / 2, y: cell.y + side / 2 + 4, "text-anchor": "middle", style }, brief(v));
      }
    }
  }
  for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
    const pairs = [`${frame.nodes[i]}--${frame.nodes[j]}`, `${frame.nodes[j]}--${frame.nodes[i]}`];
    if (!pairs.some(pair => framed.has(pair))) continue;
    const inset = (by, kind) => svg(top, "rect", { class: kind, x: left + j * side + by, y: i * side + by, width: side - 1 - 2 * by, height: side - 1 - 2 * by });
    inset(1.5, "framed");
    inset(3.5, "framed inner");
  }
  if (shared) html(box, "p", `names: ${shared}`, "muted");
}

function pairs() {
  const all = document.getElementById("heatmaps");
  if (!all) return;
  all.replaceChildren();
  const metric = data.metrics.find(each => each.name === document.getElementById("metric").value);
  const map = colours(metric);
  for (const [run, box] of boxes(all)) {
    if (!run.frames.length) { html(box, "p", `${run.name}: no pairs were measured`); continue; }
    const title = html(box, "h4"), inside = html(box, "div");
    moving.push(step => {
      const i = Math.max(0, run.frames.findLastIndex(frame => frame.step <= step)), frame = run.frames[i];
      const after = i ? run.frames[i - 1].step : -1;
      const fresh = run.alerts.filter(alert => alert.step > after && alert.step <= frame.step);
      title.textContent = `${several ? `${run.name}, ` : ""}${metric.title.replace(/\s+/g, " ")}, step ${frame.step}`;
      inside.replaceChildren();
      heatmap(inside, run, frame, metric, map, new Set(fresh.flatMap(alert => alert.pairs)));
      fresh.forEach(alert => html(inside, "p", `▲ ${alert.headline}`, "alert-mark"));
    });
  }
  colourScale(map);
}

function colourScale(map) {
  const box = document.getElementById("scale"), width = Math.min(420, Math.max(230, box.clientWidth)), bar = width - 130;
  box.replaceChildren();
  const top = svg(box, "svg", { viewBox: `0 0 ${width} 36`, style: `max-width:${width}px`, role: "img", "aria-label": "colour scale" });
  for (let i = 0; i < 60; i++) svg(top, "rect", { x: 24 + (i * bar) / 60, y: 2, width: bar / 60 + 0.5, height: 12, fill: viridis(i / 59) });
  const place = (map.isLog ? logarithmic : linear)(map.low, map.high, 24, 24 + bar);
  const ticks = place.ticks.length > 1 ? place.ticks : [map.low, map.high];
  thinned(ticks, 4).forEach(tick => svg(top, "text", { x: place(tick), y: 28, "text-anchor": "middle" }, brief(tick, 3)));
  svg(top, "rect", { class: "empty", x: bar + 40, y: 2, width: 12, height: 12 });
  svg(top, "text", { x: bar + 56, y: 12 }, "undefined");
}

// ---- the slider ----

const steps = [...new Set(data.runs.flatMap(run => run.frames.map(frame => frame.step)))].sort((a, b) => a - b);
const alerts = data.runs.flatMap(run => run.alerts.map(alert => ({ ...alert, run: run.name })));
const slider = document.getElementById("slider");

function move() {
  if (!slider) return;
  const step = steps[+slider.value];
  document.getElementById("step").textContent = `step ${step}`;
  moving.forEach(follow => follow(step));
}

function goTo(step) {
  const i = steps.findIndex(each => each >= step);
  slider.value = i < 0 ? steps.length - 1 : i;
  move();
}

function draw() {
  moving.length = 0;
  charts();
  spectra();
  pairs();
  move();
}

if (slider) {
  const select = document.getElementById("metric");
  data.metrics.forEach(metric => (html(select, "option", metric.title.replace(/\s+/g, " ")).value = metric.name));
  slider.max = steps.length - 1;
  const jumps = document.getElementById("jumps");
  const shown = [...new Map(alerts.map(alert => [alert.step, alert])).values()].slice(0, 8);
  shown.forEach(alert => html(jumps, "button", `▲ step ${alert.step}`).addEventListener("click", () => goTo(alert.step)));
  const first = steps.findIndex(step => alerts.length && step >= Math.min(...alerts.map(alert => alert.step)));
  slider.value = first < 0 ? steps.length - 1 : first;
  slider.addEventListener("input", move);
  select.addEventListener("change", draw);
}
draw();
let drawn = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === drawn) return;
  drawn = document.body.clientWidth;
  requestAnimationFrame(draw);
}).observe(document.body);
