"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const byId = (id) => document.getElementById(id);
const tip = byId("tip");

// Names come from traces: they are only ever set as text.
function make(tag, attributes = {}, ...children) {
  const space = ["svg", "line", "circle", "polyline", "text", "rect", "path"].includes(tag);
  const node = space ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function say(node, text) {
  node.addEventListener("mousemove", (event) => hint(event, typeof text === "function" ? text() : text));
  node.addEventListener("mouseleave", () => hint());
}
function hint(event, text) {
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  const right = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16;
  tip.style.left = `${Math.max(4, right)}px`;
  tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
}
const fixed = (value, digits = 1) => value.toLocaleString("en", {
  minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share, digits = 1) => `${fixed(100 * share, digits)} %`;
function span(ms) {
  if (ms === 0) return "0";
  if (Math.abs(ms) >= 1000) return `${fixed(ms / 1000, 2)} s`;
  if (Math.abs(ms) >= 1) return `${fixed(ms, 2)} ms`;
  return `${fixed(ms * 1000, 1)} µs`;
}

/* Where the time goes: one bar for each rank, in three readings. */
const IDLE = [["host_bound_ms", "host bound", "--cause-1"], ["data_wait_ms", "waits for data", "--cause-2"],
  ["synchronization_ms", "synchronization", "--cause-3"], ["kernel_gap_ms", "kernel gaps", "--cause-4"],
  ["other_ms", "other", "--cause-5"]];
const COLLECTIVES = [...new Set(data.ranks.flatMap((r) => r.communication.map((c) => c.collective)))];
const CYCLE = ["--cause-1", "--cause-2", "--cause-3", "--cause-4", "--communication", "--copies", "--cause-5"];
const READINGS = {
  parts: { title: "all time", parts: [["compute", "compute", "--compute", (r) => r.compute_ms],
    ["communication", "exposed communication", "--communication", (r) => r.exposed_communication_ms],
    ["copies", "exposed copies", "--copies", (r) => r.exposed_memory_copy_ms],
    ["idle", "idle", "--idle", (r) => r.idle_ms]] },
  idle: { title: `idle by cause${data.per === "step" ? ", in whole steps" : ""}`,
    window: (r) => r.whole_steps.window_ms,
    parts: IDLE.map(([key, name, colour]) => [key, name, colour, (r) => r.idle[key]]) },
  communication: { title: "exposed communication by collective",
    parts: COLLECTIVES.map((name, at) => [name, name, CYCLE[at % CYCLE.length], (r) =>
      r.communication.filter((c) => c.collective === name).reduce((sum, c) => sum + c.exposed_ms, 0)]) },
};
let reading = "parts", order = "rank";
function drawBars() {
  const { parts, window: lasts = (r) => r.window_ms } = READINGS[reading];
  const whole = (r) => parts.reduce((sum, p) => sum + p[3](r), 0);
  const longest = Math.max(...data.ranks.map(whole), 1e-9);
  const ranks = [...data.ranks].sort((a, b) => order === "rank" ? a.rank - b.rank : whole(b) - whole(a));
  const thin = ranks.length > 64;
  byId("bars").replaceChildren(...ranks.map((rank) => {
    const bar = make("div", {}, ...parts.map(([, name, colour, of]) => {
      const piece = make("i", { style: `width:${100 * of(rank) / longest}%;background:var(${colour})` });
      say(piece, `rank ${rank.rank}\n${name}: ${span(of(rank))}` +
        (lasts(rank) ? `, ${percent(of(rank) / lasts(rank))} of ${span(lasts(rank))}` : ""));
      return piece;
    }));
    return make("div", { class: thin ? "bar thin" : "bar" }, make("span", {}, `rank ${rank.rank}`), bar,
      make("span", {}, span(whole(rank))));
  }));
  byId("bars-legend").replaceChildren(...parts.map(([, name, colour]) =>
    make("span", {}, make("i", { style: `background:var(${colour})` }), name)));
  for (const button of document.querySelectorAll("[data-reading]"))
    button.classList.toggle("on", button.dataset.reading === reading);
  for (const button of document.querySelectorAll("[data-order]"))
    button.classList.toggle("on", button.dataset.order === order);
}
for (const [key, { title, parts }] of Object.entries(READINGS)) {
  if (!parts.length) continue;
  const button = make("button", { "data-reading": key }, title);
  button.onclick = () => { reading = key; drawBars(); };
  byId("readings").append(button);
}
for (const [key, title] of [["rank", "by rank"], ["length", "longest first"]]) {
  const button = make("button", { "data-order": key }, title);
  button.onclick = () => { order = key; drawBars(); };
  if (data.ranks.length > 1) byId("readings").append(button);
}
drawBars();

/* Step times: a line per rank, or the band of all where there are many. */
function drawSteps() {
  const lines = data.ranks.filter((r) => r.steps.length).map((r) => ({
    rank: r.rank, points: r.steps.map((s) => [s.number, s.ms]) }));
  const all = lines.flatMap((l) => l.points);
  if (!all.length) { byId("steps-part").remove(); return; }
  const w = Math.max(320, byId("steps").clientWidth);
  const [h, left, right, top, bottom] = [250, 52, 20, 14, 32];
  const numbers = all.map((p) => p[0]), first = Math.min(...numbers), last = Math.max(...numbers);
  const rough = Math.max(...all.map((p) => p[1]), 1e-6) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 2.5, 5, 10].map((f) => f * power).find((f) => f >= rough);
  const most = tick * 4.2;
  const x = (n) => left + (w - left - right) * (last > first ? (n - first) / (last - first) : 0.5);
  const y = (ms) => h - bottom - (h - top - bottom) * ms / most;
  const svg = make("svg", { viewBox: `0 0 ${w} ${h}`, role: "img" });
  for (const ms of [0, 1, 2, 3, 4].map((number) => number * tick)) {
    svg.append(make("line", { x1: left, x2: w - right, y1: y(ms), y2: y(ms), stroke: "var(--faint)" }),
      make("text", { x: left - 8, y: y(ms) + 4, "text-anchor": "end" }, fixed(ms, tick < 1 ? 2 : tick % 1 ? 1 : 0)));
  }
  const each = Math.max(1, Math.ceil((last - first) / Math.floor(w / 70)));
  for (let n = first; n <= last; n += each)
    svg.append(make("text", { x: x(n), y: h - 10, "text-anchor": "middle" }, String(n)));
  svg.append(make("text", { x: 4, y: 12 }, "ms"));
  const worst = new Map();
  for (const line of lines) for (const [n, ms] of line.points)
    if (!worst.has(n) || worst.get(n)[1] < ms) worst.set(n, [line.rank, ms]);
  for (const line of lines) {
    const faint = lines.length > 12 ? 0.15 : 0.75;
    svg.append(make("polyline", { points: line.points.map(([n, ms]) => `${x(n)},${y(ms)}`).join(" "),
      fill: "none", stroke: "var(--compute)", "stroke-opacity": faint, "stroke-width": 1.5 }));
    if (all.length <= 1500) for (const [n, ms] of line.points) {
      const slowest = worst.get(n)[0] === line.rank && lines.length > 1;
      const dot = make("circle", { cx: x(n), cy: y(ms), r: 4,
        fill: slowest ? "var(--communication)" : "var(--compute)" });
      say(dot, `rank ${line.rank}, step ${n}: ${span(ms)}${slowest ? " (slowest rank)" : ""}`);
      svg.append(dot);
    }
  }
  byId("steps").replaceChildren(svg);
}
drawSteps();

/* Tables that sort by a click on a column's head. */
function table(place, columns, rows, sortBy, needle) {
  const head = make("tr"), body = make("tbody");
  let by = sortBy, down = sortBy !== "order", filter = "";
  const fill = () => {
    const shown = rows.filter((row) => !filter || String(row[needle]).toLowerCase().includes(filter));
    const value = (row) => row[by] === null || row[by] === undefined ? -Infinity : row[by];
    shown.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (down ? -1 : 1));
    body.replaceChildren(...shown.map((row) => make("tr", {}, ...columns.map((column) => {
      const text = column.show ? column.show(row) : row[column.key];
      const cell = make("td", { class: column.text ? "name" : "number" },
        text === null || text === undefined ? "" : String(text));
      if (column.mark) cell.prepend(make("i", { style: `background:var(${column.mark(row)})` }));
      if (column.full) say(cell, column.full(row));
      return cell;
    }))));
    [...head.children].forEach((cell, at) => {
      const own = columns[at].key === by;
      cell.textContent = columns[at].title + (own ? (down ? " ▾" : " ▴") : "");
    });
  };
  for (const column of columns) {
    const cell = make("th", { class: column.text ? "" : "number" });
    cell.onclick = () => { down = by === column.key ? !down : !column.text; by = column.key; fill(); };
    head.append(cell);
  }
  fill();
  place.replaceChildren(make("table", {}, make("thead", {}, head), body));
  return (text) => { filter = text.toLowerCase(); fill(); };
}
const COLOUR = { compute: "--compute", communication: "--communication", memory_copy: "--copies" };
const sift = table(byId("kernels"), [
  { key: "short", title: "kernel", text: true, mark: (r) => COLOUR[r.kind], full: (r) => r.name },
  { key: "ms_per_step", title: `ms per ${data.per}`, show: (r) => fixed(r.ms_per_step, 3) },
  { key: "share", title: "of busy time", show: (r) => percent(r.share) },
  { key: "calls_per_step", title: "calls", show: (r) => fixed(r.calls_per_step, 1) },
  { key: "mean_us", title: "mean µs", show: (r) => fixed(r.mean_us) },
  { key: "max_us", title: "max µs", show: (r) => fixed(r.max_us) },
  { key: "peak_share", title: "of peak", show: (r) => r.peak_share === null ? "" : percent(r.peak_share, 0) },
  ...(data.ranks.length > 1 ? [{ key: "slowest_rank", title: "slowest rank" }] : []),
], data.kernels, "ms_per_step", "name");
byId("kernel-filter").oninput = (event) => sift(event.target.value);

if (data.regions.length) {
  table(byId("regions"), [
    { key: "order", title: "region", text: true, full: (r) => r.path.join("\n"),
      show: (r) => "\u2003".repeat(r.path.length - 1) + r.path[r.path.length - 1] },
    { key: "ms_per_step", title: `ms per ${data.per}`, show: (r) => fixed(r.ms_per_step, 2) },
    { key: "share", title: "of device time", show: (r) => percent(r.share) },
    { key: "own_ms_per_step", title: "own ms", show: (r) => fixed(r.own_ms_per_step, 2) },
    { key: "communication_ms_per_step", title: "communication ms",
      show: (r) => fixed(r.communication_ms_per_step, 2) },
    { key: "host_ms_per_step", title: "host ms", show: (r) => fixed(r.host_ms_per_step, 2) },
    { key: "calls_per_step", title: "calls", show: (r) => fixed(r.calls_per_step, 1) },
    { key: "kernels_per_step", title: "kernels", show: (r) => fixed(r.kernels_per_step, 0) },
    { key: "top", title: "longest kernels", text: true, full: (r) => r.kernels.map((k) =>
      `${span(k.ms)} in ${k.launches} × ${k.name}`).join("\n") },
  ], data.regions, "order", "order");
} else byId("regions-part").remove();

const size = (bytes) => bytes === null ? "" : bytes >= 1e6 ? `${fixed(bytes / 1e6)} MB` : `${fixed(bytes / 1e3)} kB`;
if (data.rank_comparison && data.rank_comparison.collectives.length) {
  table(byId("collectives"), [
    { key: "op", title: "collective", text: true },
    { key: "group", title: "group", text: true, show: (r) => r.group.startsWith("?") ? "not said" : r.group },
    { key: "ranks", title: "ranks" }, { key: "dtype", title: "type", text: true },
    { key: "bytes", title: "size", show: (r) => size(r.bytes) }, { key: "calls", title: "calls" },
    { key: "transfer_ms", title: "transfer ms", show: (r) => fixed(r.transfer_ms, 3) },
    { key: "transfer_total_ms", title: "transfer, all ms", show: (r) => fixed(r.transfer_total_ms, 2) },
    { key: "wait_total_ms", title: "arrival wait, all ranks ms", show: (r) => fixed(r.wait_total_ms, 1) },
    { key: "bus_bytes_per_s", title: "bus GB/s",
      show: (r) => r.bus_bytes_per_s === null ? "" : fixed(r.bus_bytes_per_s / 1e9, 0) },
    { key: "achieved_share", title: "of expected",
      show: (r) => r.achieved_share === null ? "" : percent(r.achieved_share, 0) },
  ], data.rank_comparison.collectives, "transfer_total_ms", "op");
} else byId("collectives-part").remove();
if (data.rank_comparison && data.rank_comparison.arrivals.length) {
  table(byId("arrivals"), [
    { key: "rank", title: "rank" }, { key: "collectives", title: "collectives" },
    { key: "num_times_last", title: "came last" },
    { key: "avoidable_wait_ms", title: "after all others, ms",
      show: (r) => fixed(r.avoidable_wait_ms, 2) },
    { key: "caused_ms", title: "others waited for it, ms", show: (r) => fixed(r.caused_ms, 1) },
    { key: "wait_ms", title: "it waited, ms", show: (r) => fixed(r.wait_ms, 1) },
    { key: "kernel_slowdown", title: "kernels, × others", show: (r) => fixed(r.kernel_slowdown, 3) },
    { key: "cause", title: "why late", text: true },
  ], data.rank_comparison.arrivals, "avoidable_wait_ms", "rank");
} else byId("arrivals-part").remove();

/* Findings: open one to see its evidence; the button shows it in the timeline. */
function drawFindings() {
  const place = byId("findings");
  if (data.findings === null) { byId("findings-part").remove(); return; }
  if (!data.findings.length) place.append(make("p", {}, data.ranks.some((r) => r.window_ms)
    ? "None of the known patterns shows." : "No device work is recorded: nothing can be told."));
  data.findings.forEach((one, at) => {
    const cost = one.ms === null ? "" : `${fixed(one.ms, 2)} ms/${data.per}`;
    const share = one.gpu_share === null ? "" : percent(one.gpu_share);
    const ranks = data.ranks.length < 2 ? "" : one.ranks.length > 8 ? `${one.ranks.length} ranks`
      : one.ranks.length ? `rank${one.ranks.length > 1 ? "s" : ""} ${one.ranks.join(", ")}` : "";
    const box = make("details", { class: "finding" },
      make("summary", {}, make("span", { class: "cost" }, [cost, share].filter(Boolean).join(" · ") || "cost not told"),
        make("span", { class: "title" }, one.title), make("span", { class: "ranks" }, ranks)),
      make("ul", {}, ...one.evidence.map((line) => make("li", {}, line))),
      make("p", { class: "remedy" }, make("b", {}, "Do: "), one.remedy));
    if (one.follows) {
      const cause = data.findings.find((other) => other.name === one.follows);
      box.classList.add("follows");
      box.querySelector("ul").after(make("p", { class: "remedy" },
        `Follows from “${cause ? cause.title : one.follows}”: mend that first.`));
    }
    if (at < 3) box.open = true;
    const where = one.spans.filter(([rank]) => strips.some((s) => s.rank === rank))[0];
    if (where) {
      const button = make("button", {}, "show in the timeline");
      button.onclick = () => showSpan(where);
      box.append(button);
    }
    place.append(box);
  });
}

/* The timeline: bins where spans are many, the longest spans by themselves. */
const strips = data.strips.map((strip) => ({ ...strip,
  lanes: strip.lanes.map((lane) => ({ label: lane.label,
    bins: Uint8Array.from(atob(lane.bins), (c) => c.charCodeAt(0)) })) }));
const canvas = byId("timeline"), pen = canvas.getContext("2d");
const LANE = 15, HEAD = 20, LABEL = 150, GAP = 8;
const KINDS = ["--compute", "--communication", "--copies"], KIND = ["compute", "communication", "copy"];
let whole = [0, 1], view = [0, 1], hits = [], marks = [];
function setUp() {
  if (!strips.length) { byId("timeline-part").remove(); return; }
  whole = [Math.min(...strips.map((s) => s.start)), Math.max(...strips.map((s) => s.end))];
  if (whole[1] <= whole[0]) { byId("timeline-part").remove(); strips.length = 0; return; }
  view = [...whole];
  marks = (data.findings || []).flatMap((one) => one.spans.map(([rank, start, end]) =>
    ({ rank, start, end, title: one.title })));
  draw();
}
function height() {
  return HEAD + strips.reduce((sum, s) => sum + (s.lanes.length + 1) * LANE + GAP, 0);
}
function draw() {
  const ratio = devicePixelRatio || 1, w = canvas.clientWidth, h = height();
  canvas.style.height = `${h}px`;
  canvas.width = w * ratio; canvas.height = h * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, w, h);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  hits = [];
  const wide = w - LABEL, scale = wide / (view[1] - view[0]);
  const x = (us) => LABEL + (us - view[0]) * scale;
  axis(x, w, h);
  let top = HEAD;
  for (const strip of strips) {
    pen.fillStyle = css("--ink"); pen.font = "600 11px system-ui, sans-serif";
    pen.fillText(`rank ${strip.rank}`, 6, top + LANE / 2);
    pen.font = "11px system-ui, sans-serif";
    pen.save(); pen.beginPath(); pen.rect(LABEL, 0, wide, h); pen.clip();
    drawMarks(strip, top, x);
    pen.restore();
    strip.lanes.forEach((lane, at) => {
      const y = top + (at + 1) * LANE;
      pen.fillStyle = css("--soft");
      pen.fillText(lane.label.length > 24 ? `…${lane.label.slice(-23)}` : lane.label, 12, y + LANE / 2);
      pen.save(); pen.beginPath(); pen.rect(LABEL, 0, wide, h); pen.clip();
      drawBins(strip, lane, y, x, w);
      drawSpans(strip, at, y, x, w);
      pen.restore();
    });
    top += (strip.lanes.length + 1) * LANE + GAP;
  }
  byId("timeline-now").textContent =
    `${span((view[0] - whole[0]) / 1000)} to ${span((view[1] - whole[0]) / 1000)} of ${span((whole[1] - whole[0]) / 1000)}`;
}
function axis(x, w, h) {
  const rough = (view[1] - view[0]) / 8, power = 10 ** Math.floor(Math.log10(rough));
  const each = [1, 2, 5, 10].map((f) => f * power).find((f) => f >= rough);
  pen.strokeStyle = css("--faint"); pen.fillStyle = css("--soft");
  for (let t = Math.ceil((view[0] - whole[0]) / each) * each; t <= view[1] - whole[0]; t += each) {
    const place = x(t + whole[0]);
    pen.beginPath(); pen.moveTo(place, HEAD - 5); pen.lineTo(place, h); pen.stroke();
    pen.textAlign = "center"; pen.fillText(span(t / 1000), Math.min(place, w - 30), 8); pen.textAlign = "left";
  }
}
function drawBins(strip, lane, y, x, w) {
  const each = (strip.end - strip.start) / lane.bins.length;
  const first = Math.max(0, Math.floor((view[0] - strip.start) / each));
  const last = Math.min(lane.bins.length, Math.ceil((view[1] - strip.start) / each));
  for (let at = first; at < last; at++) {
    const level = lane.bins[at] & 63;
    if (!level) continue;
    const from = x(strip.start + at * each);
    pen.globalAlpha = 0.25 + 0.6 * level / 63;
    pen.fillStyle = tint(KINDS[lane.bins[at] >> 6]);
    pen.fillRect(from, y + 2, Math.max(0.6, x(strip.start + (at + 1) * each) - from + 0.3), LANE - 4);
  }
  pen.globalAlpha = 1;
}
let colours = {};
const tint = (name) => colours[name] || (colours[name] = css(name));
function drawSpans(strip, lane, y, x, w) {
  for (const [own, start, length, kind, name] of strip.spans) {
    if (own !== lane || start + length < view[0] || start > view[1]) continue;
    const from = x(start), to = x(start + length);
    if (to - from < 2.5) continue;
    pen.fillStyle = tint(KINDS[kind]);
    pen.fillRect(from, y + 1, Math.max(1, to - from - 0.6), LANE - 2);
    hits.push([from, to, y, y + LANE, `${data.names[name]}\n${KIND[kind]}, ${span(length / 1000)}`]);
    if (to - from > 46) {
      pen.fillStyle = tint("--ground");
      pen.save(); pen.beginPath(); pen.rect(from + 2, y, to - from - 5, LANE); pen.clip();
      pen.fillText(data.shorts[name], Math.max(from, LABEL) + 4, y + LANE / 2 + 0.5);
      pen.restore();
    }
  }
}
function drawMarks(strip, y, x) {
  for (const [number, start, end] of strip.steps) {
    if (end < view[0] || start > view[1]) continue;
    pen.strokeStyle = tint("--accent");
    pen.strokeRect(x(start) + 0.5, y + 2.5, x(end) - x(start) - 1, LANE - 5);
    const seen = Math.max(x(start), LABEL);
    if (x(end) - seen > 46) {
      pen.fillStyle = tint("--accent");
      pen.fillText(`step ${number}`, seen + 5, y + LANE / 2 + 0.5);
    }
    hits.push([x(start), x(end), y, y + LANE, `step ${number} on the host: ${span((end - start) / 1000)}`]);
  }
  for (const mark of marks) {
    if (mark.rank !== strip.rank || mark.end < view[0] || mark.start > view[1]) continue;
    const from = x(mark.start), to = Math.max(x(mark.end), from + 3);
    pen.fillStyle = tint("--warn"); pen.globalAlpha = 0.8;
    pen.fillRect(from, y + LANE - 5, to - from, 4); pen.globalAlpha = 1;
    hits.push([from, to, y, y + LANE, `finding: ${mark.title}\n${span((mark.end - mark.start) / 1000)}`]);
  }
}
function look(from, to) {
  const least = 0.05, most = whole[1] - whole[0], length = Math.min(Math.max(to - from, least), most);
  const start = Math.min(Math.max(from, whole[0]), whole[1] - length);
  view = [start, start + length];
  draw();
}
function zoom(factor, at = (view[0] + view[1]) / 2) {
  look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
}
function showSpan([, start, end]) {
  const room = Math.max((end - start) * 1.5, 200);
  look(start - room, end + room);
  byId("timeline-part").scrollIntoView({ behavior: "smooth" });
}
const moment = (event) => view[0] +
  (event.clientX - canvas.getBoundingClientRect().left - LABEL) / (canvas.clientWidth - LABEL) * (view[1] - view[0]);
let held = null;
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
  event.preventDefault();
  zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, moment(event));
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  held = [event.clientX, view[0], view[1]]; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", () => { held = null; });
canvas.addEventListener("pointermove", (event) => {
  if (held) {
    const moved = (event.clientX - held[0]) / (canvas.clientWidth - LABEL) * (held[2] - held[1]);
    look(held[1] - moved, held[2] - moved);
    return;
  }
  const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  const own = hits.findLast(([from, to, top, low]) => px >= from && px <= to && py >= top && py < low);
  hint(event, own ? own[4] : "");
});
canvas.addEventListener("mouseleave", () => hint());
canvas.addEventListener("dblclick", (event) => zoom(0.4, moment(event)));
byId("zoom-in").onclick = () => zoom(0.5);
byId("zoom-out").onclick = () => zoom(2);
byId("zoom-all").onclick = () => look(...whole);
byId("go-left").onclick = () => look(view[0] - (view[1] - view[0]) / 3, view[1] - (view[1] - view[0]) / 3);
byId("go-right").onclick = () => look(view[0] + (view[1] - view[0]) / 3, view[1] + (view[1] - view[0]) / 3);
addEventListener("resize", () => { if (byId("steps")) drawSteps(); if (strips.length) draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = {}; if (strips.length) draw(); });
drawFindings();
setUp();
