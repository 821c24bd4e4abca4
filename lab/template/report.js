"use strict";
const all = (selector) => [...document.querySelectorAll(selector)];
const token = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
const main = document.querySelector("main");
const PAPER_PX = 690; // printable width of A4 inside the margins, in CSS pixels

// ---- figures: plotly.js is unpacked once, then every figure is drawn and follows the theme ----
async function unpackPlotly() {
  const packed = document.getElementById("plotly-gzip");
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed.textContent), (c) => c.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
}
function look(plot) {
  const style = {
    "font.color": token("--ink"), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    "hoverlabel.bgcolor": token("--surface"), "hoverlabel.bordercolor": token("--line"), "hoverlabel.font.color": token("--ink"),
    "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": token("--ink-soft"), "modebar.activecolor": token("--accent"),
    "legend.bgcolor": "rgba(0,0,0,0)",
  };
  for (const axis of Object.keys(plot._fullLayout).filter((key) => /^[xy]axis\d*$/.test(key))) {
    style[`${axis}.gridcolor`] = token("--grid");
    style[`${axis}.zerolinecolor`] = style[`${axis}.linecolor`] = style[`${axis}.tickcolor`] = token("--line");
  }
  return style;
}
const plots = () => all(".figure .plot").filter((plot) => plot._fullLayout);
const titleOf = (layout) => (layout?.title?.text ?? "").replace(/<[^>]*>/g, " ").replace(/\s+/g, " ").trim();
const NOTHING_LEAVES = { plotlyServerURL: "", modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d"] };
async function drawFigures() {
  const figures = all(".figure");
  root.dataset.figures = `0/${figures.length}`;
  await unpackPlotly();
  for (const [index, figure] of figures.entries()) {
    const plot = figure.querySelector(".plot");
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const { width, ...layout } = spec.layout ?? {};
    const config = { ...spec.config, responsive: true, displaylogo: false, ...NOTHING_LEAVES };
    const name = titleOf(layout) || `Figure ${index + 1}`;
    plot.setAttribute("aria-label", name);
    figure.querySelector(".csv").addEventListener("click", () => save(`${slug(name)}.csv`, figureCsv(spec), "text/csv"));
    try {
      await Plotly.newPlot(plot, spec.data, layout, config);
      await Plotly.relayout(plot, look(plot));
      root.dataset.figures = `${index + 1}/${figures.length}`;
    } catch (error) {
      plot.insertAdjacentHTML("beforeend", '<p class="broken"></p>');
      plot.querySelector(".broken").textContent = `This figure could not be drawn: ${error}`;
      console.error(error);
    }
  }
  root.dataset.drawn = "done";
}
addEventListener("themechange", () => plots().forEach((plot) => Plotly.relayout(plot, look(plot))));

// ---- a figure's data as CSV: one row for each point, with its trace's name ----
const TYPED = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };
function values(item) { // a plain list, or plotly's {dtype, bdata, shape}
  if (Array.isArray(item)) return item.map((value) => (Array.isArray(value) || value?.bdata ? values(value) : value));
  if (!item?.bdata) return null;
  const bytes = Uint8Array.from(atob(item.bdata), (c) => c.charCodeAt(0));
  const flat = Array.from(new TYPED[item.dtype](bytes.buffer));
  const shape = String(item.shape ?? flat.length).split(",").map(Number);
  if (shape.length === 1) return flat;
  return Array.from({ length: shape[0] }, (_, row) => flat.slice(row * shape[1], (row + 1) * shape[1]));
}
function traceColumns(trace) {
  const columns = {};
  const put = (name, item) => { const list = values(item); if (list) columns[name] = list; };
  if (trace.z) {
    const z = values(trace.z), x = values(trace.x), y = values(trace.y), text = values(trace.text);
    const cells = z.flatMap((row, i) => row.map((value, j) => [x?.[j] ?? j, y?.[i] ?? i, value, text?.[i]?.[j]]));
    ["x", "y", "z", "text"].forEach((name, k) => { if (name !== "text" || text) columns[name] = cells.map((cell) => cell[k]); });
    return columns;
  }
  for (const name of ["ids", "labels", "values", "x", "y", "base", "width", "open", "high", "low", "close", "text", "hovertext"]) put(name, trace[name]);
  for (const bar of ["error_x", "error_y"]) for (const side of ["array", "arrayminus"]) put(`${bar}_${side === "array" ? "plus" : "minus"}`, trace[bar]?.[side]);
  for (const name of ["size", "color"]) put(`marker_${name}`, trace.marker?.[name]);
  const custom = values(trace.customdata);
  if (custom?.length && Array.isArray(custom[0])) custom[0].forEach((_, k) => { columns[`customdata_${k}`] = custom.map((row) => row?.[k]); });
  else if (custom) columns.customdata = custom;
  return columns;
}
function figureCsv(spec) {
  const tables = (spec.data ?? []).map((trace, k) => ({ name: trace.name ?? `trace ${k + 1}`, trace, columns: traceColumns(trace) }));
  const names = [...new Set(tables.flatMap((table) => Object.keys(table.columns)))];
  const axisTitles = (letter) => new Set(tables.map(({ trace }) => {
    const axis = (trace[`${letter}axis`] ?? letter).replace(letter, `${letter}axis`);
    return titleOf(spec.layout?.[axis]);
  }));
  const heading = (name) => {
    const titles = name === "x" || name === "y" ? [...axisTitles(name)] : [];
    return titles.length === 1 && titles[0] ? titles[0] : name;
  };
  const rows = [["trace", ...names.map(heading)]];
  for (const { name, columns } of tables) {
    const length = Math.max(0, ...Object.values(columns).map((column) => column.length));
    for (let i = 0; i < length; i += 1) {
      const row = names.map((column) => columns[column]?.[i] ?? "");
      if (row.some((value) => value !== "")) rows.push([name, ...row]);
    }
  }
  const quote = (value) => (/[",\n\r]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return rows.map((row) => row.map(quote).join(",")).join("\r\n") + "\r\n";
}
const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure";
function save(name, content, type) {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([content], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// ---- tables: a column of numbers is set flush right, its heading too ----
const NUMBER = /^[\s<>≤≥±~×x−+-]*[\d.,  ]*\d[\d.,]*(e[+-]?\d+)?\s*[%×x]?$/i;
const EMPTY = /^(|–|-|nan|none|<na>)$/i;
for (const table of all("table")) {
  const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
  if (!rows.length || rows.some((row) => [...row.cells].some((cell) => cell.colSpan > 1 || cell.rowSpan > 1))) continue;
  for (let column = 0; column < rows[0].cells.length; column += 1) {
    const cells = rows.map((row) => row.cells[column]).filter(Boolean);
    const texts = cells.map((cell) => cell.textContent.trim()).filter((text) => !EMPTY.test(text));
    if (texts.some((text) => text.length > 32)) cells.forEach((cell) => cell.classList.add("prose"));
    if (!texts.length || !texts.every((text) => NUMBER.test(text))) continue;
    const heads = [...(table.tHead?.rows ?? [])].map((row) => row.cells[column]).filter((cell) => cell?.colSpan === 1);
    [...cells, ...heads].forEach((cell) => cell.classList.add("numeric"));
  }
}

// ---- contents, with the place where the reader is ----
const links = new Map();
for (const heading of all("main h2, main h3, #design-note h1").filter((h) => h.id && (h.localName === "h1" || !h.closest("#design-note")))) {
  const link = Object.assign(document.createElement("a"), { href: `#${heading.id}`, className: heading.localName });
  link.textContent = heading.textContent.replace("¶", "");
  const item = document.createElement("li");
  item.append(link);
  document.getElementById("headings").append(item);
  links.set(heading, link);
}
function markPlace() {
  const atEnd = scrollY > 0 && innerHeight + scrollY >= document.body.scrollHeight - 2;
  const passed = [...links.keys()].filter((heading) => atEnd || heading.getBoundingClientRect().top < 120);
  const current = passed.at(-1);
  links.forEach((link, heading) => { heading === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current"); });
}
addEventListener("scroll", markPlace, { passive: true });
markPlace();

// ---- tools ----
const codeButton = document.getElementById("code");
codeButton.addEventListener("click", () => {
  const show = codeButton.getAttribute("aria-pressed") !== "true";
  codeButton.setAttribute("aria-pressed", String(show));
  codeButton.textContent = show ? "Hide code" : "Show code";
  all("details.code").forEach((details) => { details.open = show; });
});
document.getElementById("print").addEventListener("click", () => print());
document.getElementById("print-note")?.addEventListener("click", () => { root.classList.add("only-note"); print(); });
for (const link of all("main a.lab-download")) {
  const copy = Object.assign(link.cloneNode(true), { className: "button" });
  document.getElementById("downloads").append(copy);
}

// ---- paper: light, figures and wide tables as wide as the sheet, panels open ----
let before = null;
function preparePaper() {
  if (before) return;
  before = { theme: root.dataset.theme, closed: all("details.panel:not([open])"), heights: plots().map((plot) => plot.layout.height ?? null) };
  before.closed.forEach((details) => { details.open = true; });
  setTheme("light");
  plots().forEach((plot) => Plotly.relayout(plot, { width: PAPER_PX, height: Math.min(plot._fullLayout.height, 900) }));
  main.style.width = `${PAPER_PX}px`;
  all("main table").forEach((table) => { table.style.zoom = Math.max(0.4, Math.min(1, main.clientWidth / table.offsetWidth)); });
  main.style.width = "";
}
function afterPaper() {
  if (!before) return;
  before.closed.forEach((details) => { details.open = false; });
  setTheme(before.theme);
  plots().forEach((plot, k) => Plotly.relayout(plot, { width: null, height: before.heights[k], autosize: true }));
  all("main table").forEach((table) => { table.style.zoom = ""; });
  root.classList.remove("only-note");
  before = null;
}
addEventListener("beforeprint", preparePaper);
addEventListener("afterprint", afterPaper);
if (location.hash === "#only-note") root.classList.add("only-note");
drawFigures();
