// Draws the panels of one page. The data is either inside the page (a frozen report) or asked for every second (live).
// Texts from runs only ever become text: textContent here, and `safe` for what Plotly would take as markup.
"use strict";
(() => {
  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A"];
  const DASHES = ["solid", "dash", "dot"];
  const WAIT = 1000, WORDS_WAIT = 4000; // milliseconds
  const byId = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const state = { runs: [], panels: new Map(), figures: {}, version: null, paused: false, statuses: "" };

  // -- small helpers ---------------------------------------------------------------------------------------------
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  function safe(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%\u200b{");
  }
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shorten = (text) => (text.length > 40 ? text.slice(0, 18) + "…" + text.slice(-20) : text);
  const thousands = (n) => Number(n).toLocaleString("en-US");

  // Layers of deep networks get colours along their depth, a few layers colours that are easy to tell apart.
  function colour(i, count) {
    if (count <= COLOURS.length) return COLOURS[i % COLOURS.length];
    const t = i / (count - 1);
    return `hsl(${Math.round(265 - 220 * t)} 70% ${dark.matches ? 62 : 42}%)`;
  }
  // How many powers of ten the values of these curves span.
  function decades(curves) {
    let low = Infinity, high = 0;
    for (const { y } of curves) for (const v of y) if (v > 0) { low = Math.min(low, v); high = Math.max(high, v); }
    return high > 0 ? Math.log10(high / low) : 0;
  }
  const runLine = (run) => ({
    color: COLOURS[run.group % COLOURS.length],
    dash: DASHES[Math.floor(run.group / COLOURS.length) % DASHES.length],
  });

  function themed(layout, height) {
    const ink = variable("--ink"), line = variable("--line"), paper = variable("--paper");
    const made = {
      height, margin: { l: 60, r: 12, t: 36, b: 44 }, hovermode: "closest",
      legend: { orientation: "h", yanchor: "bottom", y: 1.04, x: 0 }, ...layout,
      template: {}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 13, color: ink },
      hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink } },
    };
    const axes = Object.keys(made).filter((key) => /^[xy]axis\d*$/.test(key));
    for (const key of axes)
      made[key] = { ...made[key], gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
    for (const note of made.annotations || []) {
      if (note.bgcolor) note.bgcolor = paper;
      note.font = { ...(note.font || {}), color: ink };
    }
    return made;
  }
  const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

  // -- one panel -------------------------------------------------------------------------------------------------
  class Panel {
    constructor(described) {
      this.id = described.id;
      this.quantity = null;
      this.layer = null;
      this.zoom = null;
      this.visible = frozen !== null;
      this.chart = element("div", { class: "chart", id: `chart-${this.id}`, role: "img" });
      this.map = element("div", { class: "chart map", id: `chart-map-${this.id}`, role: "img" });
      this.controls = element("div", { class: "controls" });
      const title = element("h2", { id: `title-${this.id}` });
      title.textContent = described.title;
      const about = element("p", { class: "note" });
      about.textContent = described.about;
      this.section = element(
        "section", { class: "panel", id: `panel-${this.id}`, "aria-labelledby": `title-${this.id}` },
        title, about, this.controls, this.map, this.chart,
      );
      this.map.hidden = !described.map;
      const [home, holder] = described.known ? [byId("panels"), null] : [byId("other-panels"), byId("others")];
      if (holder) holder.hidden = false;
      home.append(this.section);
      this.quantities = this.menu("show", (value) => { this.quantity = value; this.layer = null; this.changed(); });
      this.layers = this.menu("of", (value) => { this.layer = value; this.changed(); });
      this.log = element("input", { type: "checkbox" });
      this.log.checked = described.log;
      this.log.addEventListener("change", () => this.draw());
      const label = element("label", {}, this.log, " logarithmic");
      this.controls.append(label);
      if (frozen === null) watcher.observe(this.section);
    }

    menu(text, chosen) {
      const select = element("select");
      const label = element("label", {}, `${text} `, select);
      select.addEventListener("change", () => chosen(select.value));
      this.controls.append(label);
      return { select, label };
    }

    describe(described) {
      this.described = described;
      const keys = described.quantities.map((q) => q.key);
      if (!keys.includes(this.quantity)) this.quantity = keys[0];
      fill(this.quantities, described.quantities.map((q) => [q.key, q.name]), this.quantity);
      const layers = this.current().layers;
      const options = [];
      if (layers.includes("")) options.push(["", "whole network"]);
      if (layers.some((one) => one !== "")) options.push(["*", layers.includes("") ? "all layers" : "all layers"]);
      options.push(...layers.filter((one) => one !== "").map((one) => [`=${one}`, one]));
      if (!options.some(([value]) => value === this.layer)) this.layer = options[0][0];
      fill(this.layers, options, this.layer);
    }

    share() { return /\/(share|deficient|changed|misclassified|censored)$/.test(this.quantity); }

    current() { return this.described.quantities.find((q) => q.key === this.quantity); }

    changed() {
      this.zoom = null;
      this.describe(this.described);
      if (frozen !== null) { this.take(frozen.data); this.draw(); } else poll({ key: this.quantity });
    }

    take(data) {
      if (data[this.quantity]) this.data = { key: this.quantity, ...data[this.quantity] };
    }

    draw() {
      if (!this.data || this.data.key !== this.quantity) return;
      const { traces, layout } = this.lines();
      if (!window.Plotly) { preview(this.chart, traces, layout); return; }
      if (!this.bound) this.chart.replaceChildren();
      layout.uirevision = `${this.quantity} ${this.layer}`;
      this.apart = layout.annotations !== undefined;
      arrange();
      Plotly.react(this.chart, traces, themed(layout, 330), CONFIG);
      this.chart.setAttribute("aria-label", this.spoken());
      if (!this.bound) {
        this.bound = true;
        this.chart.on("plotly_relayout", (event) => this.moved(event));
      }
      this.heat();
    }

    lines() {
      const wanted = this.data.curves.filter(({ layer }) =>
        this.layer === "" ? layer === "" : this.layer === "*" ? layer !== "" : layer === this.layer.slice(1));
      const runs = [...new Set(wanted.map((curve) => curve.run))];
      const layers = this.current().layers.filter((one) => wanted.some((curve) => curve.layer === one));
      const apart = this.layer === "*" && runs.length > 1 && layers.length > 1; // one set of axes for each run, side by side
      const byLayer = this.layer === "*" && (apart || runs.length === 1);
      const seen = new Set();
      const traces = [];
      for (const curve of wanted) {
        const run = state.runs[curve.run];
        const name = byLayer ? curve.layer : run.label;
        const place = apart ? runs.indexOf(curve.run) + 1 : 1;
        const line = byLayer ? { color: colour(layers.indexOf(curve.layer), layers.length) } : runLine(run);
        const axes = { xaxis: place > 1 ? `x${place}` : "x", yaxis: place > 1 ? `y${place}` : "y" };
        const common = {
          type: "scatter", mode: curve.x.length === 1 ? "markers" : "lines", legendgroup: name, ...axes,
          hovertemplate: `step %{x:,}: %{y:.4g}<extra>${safe(shorten(name))}</extra>`,
        };
        if (curve.raw && wanted.length === 1)
          traces.push({ ...common, ...curve.raw, name: "every step", line: { ...line, width: 1 }, opacity: 0.3, hoverinfo: "skip", hovertemplate: undefined });
        traces.push({
          ...common, x: curve.x, y: curve.y, name: safe(shorten(name)), line: { ...line, width: byLayer ? 1.6 : 2 },
          showlegend: !seen.has(name), opacity: runs.length > 6 ? 0.8 : 1,
        });
        seen.add(name);
      }
      const layout = { showlegend: seen.size <= 14 && (seen.size > 1 || byLayer) };
      const count = apart ? runs.length : 1;
      const gap = 0.03, width = (1 - gap * (count - 1)) / count;
      for (let i = 0; i < count; i++) {
        const n = i ? i + 1 : "", start = i * (width + gap);
        layout[`xaxis${n}`] = { title: { text: "step" }, domain: [start, start + width], anchor: `y${n}` };
        layout[`yaxis${n}`] = { type: this.log.checked ? "log" : "linear", anchor: `x${n}`, exponentformat: "power" };
        if (!this.log.checked && this.described.known) layout[`yaxis${n}`].rangemode = "tozero";
        if (this.share()) layout[`yaxis${n}`].tickformat = ".0%";
        if (this.log.checked && decades(wanted) > 2) layout[`yaxis${n}`].dtick = 1;
        if (i) Object.assign(layout[`yaxis${n}`], { matches: "y", showticklabels: false });
        else layout.yaxis.title = { text: safe(shorten(this.current().name.split(" (")[0])) };
      }
      if (apart) {
        layout.margin = { l: 64, r: 16, t: 70, b: 48 };
        layout.legend = { orientation: "h", yanchor: "bottom", y: 1.12, x: 0 };
        layout.annotations = runs.map((index, i) => ({
          text: safe(shorten(state.runs[index].label)), showarrow: false, xref: "paper", yref: "paper", yanchor: "bottom",
          x: i * (width + gap) + width / 2, y: 1,
        }));
      }
      return { traces, layout };
    }

    heat() {
      const maps = this.data.maps || [];
      this.map.hidden = maps.length === 0;
      if (!maps.length) return;
      const share = this.share(), rows = maps.map((one) => one.layers.length);
      const total = rows.reduce((a, b) => a + b, 0);
      const values = maps.flatMap((one) => one.z.flat()).filter((v) => v !== null);
      const [low, high] = share ? [0, 1] : [0, values.reduce((a, b) => Math.max(a, b), 0)];
      const layout = { margin: { l: 90, r: 16, t: 34, b: 48 }, annotations: [] };
      const tiles = Math.min(900, Math.max(total * 26, maps.length * 60)), inside = tiles + 30 * (maps.length - 1);
      const gap = 30 / inside; // room for a title between two maps
      const traces = [];
      let top = 1;
      maps.forEach((one, i) => {
        const n = i ? i + 1 : "", height = ((1 - gap * (maps.length - 1)) * rows[i]) / total;
        traces.push({
          type: "heatmap", x: one.x, y: one.layers.map((layer) => safe(shorten(layer))), z: one.z, xaxis: `x${n}`, yaxis: `y${n}`,
          zmin: low, zmax: high, colorscale: "Cividis", showscale: i === 0, hoverongaps: false,
          colorbar: { tickformat: share ? ".0%" : "", thickness: 14 },
          hovertemplate: `step %{x:,}, %{y}: %{z:${share ? ".1%" : ".4g"}}<extra>${safe(shorten(state.runs[one.run].label))}</extra>`,
        });
        layout[`yaxis${n}`] = { type: "category", autorange: "reversed", domain: [Math.max(top - height, 0), top], anchor: `x${n}` };
        layout[`xaxis${n}`] = { anchor: `y${n}`, showticklabels: i === maps.length - 1, ...(i ? { matches: "x" } : {}) };
        if (i === maps.length - 1) layout[`xaxis${n}`].title = { text: "step" };
        layout.annotations.push({
          text: safe(maps.length > 1 ? shorten(state.runs[one.run].label) : `${this.current().name} of each layer over time`),
          showarrow: false, xref: "paper", yref: "paper", x: 0, xanchor: "left", y: top, yanchor: "bottom",
        });
        top -= height + gap;
      });
      Plotly.react(this.map, traces, themed(layout, inside + 82), CONFIG);
      this.map.setAttribute("aria-label", `Heat map: ${this.current().name} by layer and step. ${this.spoken()}`);
    }

    // What a chart shows last, for those who do not see it.
    spoken() {
      const parts = this.data.curves.slice(0, 12).map(({ run, layer, y }) =>
        `${state.runs[run].label}${layer ? ` ${layer}` : ""} ${y.length && y[y.length - 1] !== null ? y[y.length - 1] : "no value"}`);
      return `${this.described.title}, ${this.current().name}. Last values: ${parts.join("; ")}.`;
    }

    // Zoomed in: ask for the points in between, and leave this panel as it is until it is reset.
    moved(event) {
      if (frozen !== null) return;
      const low = event["xaxis.range[0]"], high = event["xaxis.range[1]"];
      if (low !== undefined) { this.zoom = [Math.max(low, 0), Math.max(high, 0)]; poll({ key: this.quantity, low: this.zoom[0], high: this.zoom[1] }); }
      else if (event["xaxis.autorange"]) { this.zoom = null; poll({ key: this.quantity }); }
    }
  }

  // Curves before Plotly is there: the same lines in the same place, with the ends of the axes.
  function preview(chart, traces, layout) {
    const width = chart.clientWidth, height = 330, margin = { l: 60, r: 12, t: 36, b: 44 };
    const log = layout.yaxis.type === "log";
    const level = (v) => (v === null || (log && v <= 0) ? null : log ? Math.log10(v) : v);
    let [left, right, low, high] = [Infinity, -Infinity, log || layout.yaxis.rangemode !== "tozero" ? Infinity : 0, -Infinity];
    for (const { x, y } of traces)
      y.forEach((v, i) => {
        const at = level(v);
        if (at === null) return;
        left = Math.min(left, x[i]); right = Math.max(right, x[i]); low = Math.min(low, at); high = Math.max(high, at);
      });
    if (!(right >= left) || layout.annotations || !width) return;
    const across = (v) => margin.l + ((v - left) / (right - left || 1)) * (width - margin.l - margin.r);
    const down = (v) => height - margin.b - ((v - low) / (high - low || 1)) * (height - margin.t - margin.b);
    const drawn = (tag, attributes) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      return made;
    };
    const svg = drawn("svg", { class: "preview", width, height, "aria-hidden": "true" });
    for (const { x, y, line, opacity } of traces) {
      let path = "", pen = "M";
      y.forEach((v, i) => {
        const at = level(v);
        if (at === null) { pen = "M"; return; }
        path += `${pen}${across(x[i]).toFixed(1)} ${down(at).toFixed(1)}`;
        pen = "L";
      });
      svg.append(drawn("path", { d: path, fill: "none", stroke: line.color, "stroke-width": line.width, opacity: opacity || 1 }));
    }
    const label = (text, x, y, anchor) => {
      const made = drawn("text", { x, y, "text-anchor": anchor, "font-size": 13, fill: "currentColor" });
      made.textContent = text;
      svg.append(made);
    };
    for (const at of [low, high]) label(Number((log ? 10 ** at : at).toPrecision(2)), margin.l - 6, down(at) + 4, "end");
    for (const [at, anchor] of [[left, "start"], [right, "end"]]) label(thousands(at), across(at), height - margin.b + 18, anchor);
    chart.replaceChildren(svg);
  }

  function fill({ select, label }, options, chosen) {
    const text = JSON.stringify(options);
    if (select.dataset.options !== text) {
      select.dataset.options = text;
      select.replaceChildren(...options.map(([value, name]) => {
        const option = element("option", { value });
        option.textContent = name;
        return option;
      }));
    }
    select.value = chosen;
    label.hidden = options.length < 2;
  }

  // Two panels beside each other; what needs room, or has no neighbour, takes a whole row.
  function arrange() {
    let waiting = null;
    const lone = () => { if (waiting) waiting.section.classList.add("wide"); waiting = null; };
    let home = null;
    for (const panel of state.panels.values()) {
      if (panel.section.parentNode !== home) lone();
      home = panel.section.parentNode;
      const wide = panel.described.map || panel.apart;
      panel.section.classList.toggle("wide", Boolean(wide));
      if (wide) lone(); else waiting = waiting ? null : panel;
    }
    lone();
  }

  // -- the whole page --------------------------------------------------------------------------------------------
  function update(answer) {
    state.runs = answer.runs;
    for (const described of answer.panels || []) {
      if (!state.panels.has(described.id)) state.panels.set(described.id, new Panel(described));
      state.panels.get(described.id).describe(described);
    }
    if (answer.panels) {
      const there = new Set(answer.panels.map(({ id }) => id));
      for (const panel of state.panels.values()) panel.section.hidden = !there.has(panel.id);
      arrange();
    }
    if (answer.data) for (const panel of state.panels.values())
      if (answer.data[panel.quantity]) { panel.take(answer.data); panel.draw(); }
  }

  function showFindings(findings) {
    const marks = { warning: "Warning:", good: "Good:" };
    const runs = [...new Set(findings.map((one) => one.run))];
    const lists = runs.map((run) => {
      const list = element("ul");
      for (const { kind, text } of findings.filter((one) => one.run === run)) {
        const item = element("li", { class: kind });
        if (marks[kind]) item.append(element("b", {}, marks[kind]));
        item.append(text);
        list.append(item);
      }
      if (runs.length === 1 && state.runs.length === 1) return list;
      const head = element("h3");
      head.textContent = run;
      return element("div", {}, head, list);
    });
    byId("findings").hidden = findings.length === 0;
    const many = lists.length > 3 && element("details", {}, element("summary", {}, `Show the findings of ${lists.length} runs`), ...lists);
    byId("findings-list").replaceChildren(...(many ? [many] : lists));
  }

  function drawFigures() {
    if (!window.Plotly) return;
    for (const place of document.querySelectorAll("[data-figure]")) {
      const figure = state.figures[place.dataset.figure];
      if (figure) {
        const layout = JSON.parse(JSON.stringify(figure.layout));
        Plotly.react(place, figure.data, themed(layout, layout.height || 400), CONFIG);
      }
    }
  }

  function redraw() {
    for (const panel of state.panels.values()) panel.draw();
    drawFigures();
  }
  dark.addEventListener("change", redraw);

  const holder = byId("frozen");
  const frozen = holder ? JSON.parse(holder.textContent) : null;
  let watcher = null, poll = () => {};
  if (frozen !== null) {
    state.figures = frozen.figures;
    update(frozen);
    drawFigures();
    showFindings(frozen.findings);
    return;
  }

  // -- live ------------------------------------------------------------------------------------------------------
  const chosen = [...document.querySelectorAll("#heads tr")].map((row) => row.dataset.run);
  const link = byId("link");
  let look;
  const looked = new Promise((resolve) => { look = resolve; });
  watcher = new IntersectionObserver((entries) => {
    look();
    const asked = [];
    for (const entry of entries)
      for (const panel of state.panels.values())
        if (panel.section === entry.target) {
          panel.visible = entry.isIntersecting;
          if (panel.visible && (!panel.data || panel.stale)) asked.push(panel.quantity);
        }
    if (asked.length && state.version !== null) poll({ key: asked }); // a page that opens asks for all of them at once
  }, { rootMargin: "300px" });

  // Of very many metrics a part is shown; the others are found by a part of their name.
  const find = byId("find"), part = find.querySelector("input"), rest = find.querySelector("span");
  part.addEventListener("input", () => { state.version = null; });

  async function ask(path, parameters = {}) {
    const query = new URLSearchParams(part.value ? { names: part.value } : {});
    for (const run of chosen) query.append("run", run);
    for (const [name, value] of Object.entries(parameters))
      for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
    const answer = await fetch(`${path}?${query}`, { headers: { accept: "application/json" } });
    if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
    return answer.json();
  }

  poll = async (parameters) => {
    try { update(await ask("/api/view", parameters)); } catch (error) { link.textContent = `No response: ${error.message}`; }
  };

  function ago(seconds) {
    if (seconds === null) return "no measurements yet";
    const age = Math.max(0, Date.now() / 1000 - seconds);
    const [n, unit] = age < 90 ? [age, "second"] : age < 5400 ? [age / 60, "minute"] : age < 129600 ? [age / 3600, "hour"] : [age / 86400, "day"];
    return `last measurement ${Math.round(n)} ${unit}${Math.round(n) === 1 ? "" : "s"} ago`;
  }

  function heads() {
    for (const run of state.runs) {
      const row = [...document.querySelectorAll("#heads tr")].find((one) => one.dataset.run === run.id);
      const name = row.querySelector(".name");
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = runLine(run).color;
      name.replaceChildren(...(state.runs.length > 1 ? [swatch] : []), run.label);
      const status = row.querySelector(".status");
      status.className = `status ${run.status}`;
      const why = element("span", { class: "reason" });
      why.textContent = run.reason ? ` ${run.reason}` : "";
      status.replaceChildren(run.status, why);
      row.querySelector(".step").textContent = run.step === null ? "" : `step ${thousands(run.step)}`;
      row.querySelector(".updated").textContent = ago(run.updated);
    }
  }

  const ready = new Promise((resolve) => {
    if (window.Plotly) resolve(); else document.addEventListener("DOMContentLoaded", resolve, { once: true });
  });
  const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
  let sayAgain = -Infinity, saidVersion = null;

  async function extras() {
    const statuses = state.runs.map((run) => run.status).join();
    const started = performance.now();
    if (state.version !== saidVersion && started > sayAgain) {
      saidVersion = state.version;
      showFindings((await ask("/api/findings")).findings);
      sayAgain = performance.now() + Math.max(WORDS_WAIT, 5 * (performance.now() - started));
    }
    if (statuses !== state.statuses) {
      state.statuses = statuses;
      const found = await ask("/api/details");
      byId("top").innerHTML = found.top; // made and escaped by the server's templates
      byId("bottom").innerHTML = found.bottom;
      state.figures = found.figures;
      drawFigures();
    }
  }

  // The page comes with a few values of every series. All of them are asked for while the browser is busy with Plotly,
  // which takes longer than reading them; until it is there curves are drawn without it.
  async function live() {
    ready.then(redraw);
    const first = JSON.parse(byId("first").textContent);
    if (first !== null) {
      update(first);
      heads();
      document.body.dataset.drawn = "rough";
      await Promise.race([looked, sleep(200)]);
    }
    for (let pause = 0; ; ) {
      await sleep(pause);
      if (state.paused || document.hidden) { pause = WAIT; continue; }
      const started = performance.now();
      try {
        const shown = [...state.panels.values()].filter((panel) => panel.visible);
        const keys = shown.filter((panel) => panel.zoom === null).map((panel) => panel.quantity);
        const since = state.version === null ? {} : { since: state.version };
        const found = await ask("/api/view", { key: keys.length ? keys : ["*"], ...since });
        if (found.panels) for (const panel of state.panels.values()) panel.stale = !panel.visible;
        state.version = found.version;
        update(found);
        heads();
        if (found.panels) {
          find.hidden = found.left_out === 0 && part.value === "";
          rest.textContent = found.left_out ? `${thousands(found.left_out)} more metrics are not shown` : "";
          const missing = shown.filter((panel) => !panel.section.hidden && panel.data && panel.data.key !== panel.quantity);
          if (missing.length) poll({ key: missing.map((panel) => panel.quantity) });
        }
        link.textContent = "";
        document.body.dataset.drawn = "full";
        await ready;
        document.body.dataset.updates = Number(document.body.dataset.updates || 0) + (found.panels ? 1 : 0);
        pause = Math.max(WAIT, 3 * (performance.now() - started)); // a slow machine is asked less often
        await extras();
      } catch (error) {
        link.textContent = `No response: ${error.message}. Retrying.`;
        state.version = null;
        pause = WAIT;
      }
    }
  }
  byId("pause").addEventListener("click", (event) => {
    state.paused = !state.paused;
    event.target.setAttribute("aria-pressed", String(state.paused));
    event.target.textContent = state.paused ? "Resume" : "Pause";
  });
  live();
})();
