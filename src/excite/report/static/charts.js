// Charts of all pages: lines (drawn by uPlot) and heat maps (a canvas), with legend, tooltip, zoom and a table of values.
// Names from runs only become text (textContent, fillText), never markup. Values that are not finite are null.
"use strict";
window.ExciteCharts = (() => {
  const { number, power, linearTicks, logTicks, shorten, cut, thousands } = window.ExciteLabels;
  const LIGHT = {
    ink: "#1f2328", soft: "#596270", line: "#dcdfe6", paper: "#ffffff", bad: "#b3261e", band: "rgba(110, 118, 129, 0.22)",
    lines: ["#0072B2", "#D55E00", "#00875F", "#B0528A", "#A06A00", "#6A51A3", "#666666"],
  };
  const DARK = {
    ink: "#e6e8eb", soft: "#a3abb6", line: "#343a43", paper: "#14171b", bad: "#ff8a80", band: "rgba(170, 180, 190, 0.25)",
    lines: ["#4FB3F0", "#FF8A4C", "#3CCB9B", "#E79AC5", "#F2B93B", "#B8A6F5", "#BBBBBB"],
  };
  const DASHES = [[], [8, 5], [2, 4], [10, 4, 2, 4]];
  const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
  const LISTED = 8; // curves with an entry of their own in the legend; more get a scale of colours
  const PRINTED = 680; // pixels across a sheet of paper
  const FONT = "12px system-ui, sans-serif";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Set();
  let printing = false;
  const theme = () => (dark.matches && !printing ? DARK : LIGHT);

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  const finite = (value) => value !== null && value !== undefined && Number.isFinite(value);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // Colour of a line: an index into the palette, or {depth: 0 to 1} along a scale for the layers of deep networks.
  function colour(chosen) {
    if (typeof chosen === "number") return theme().lines[chosen % theme().lines.length];
    return `hsl(${Math.round(265 - 225 * chosen.depth)} 75% ${theme() === DARK ? 64 : 40}%)`;
  }
  const layerColour = (i, count) => (count <= LISTED - 1 ? i : { depth: i / (count - 1) });

  // Index of the last value of a sorted list that is at most `value`; -1 if there is none.
  function search(list, value) {
    let [low, high] = [0, list.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] <= value) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  // -- what both kinds of charts share ---------------------------------------------------------------------------
  class Chart {
    constructor(place) {
      this.place = place;
      place.chart = this;
      this.plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart" });
      this.tip = element("div", { class: "tip", role: "status" });
      this.tip.hidden = true;
      this.plot.append(this.tip);
      place.replaceChildren(this.plot);
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.plot.addEventListener("blur", () => this.leave());
      this.plot.addEventListener("pointerleave", () => { if (!this.dragging) this.leave(); });
      this.width = 0;
      this.observer = new ResizeObserver(() => { if (!printing && this.fit()) this.render(); });
      this.observer.observe(place);
      drawn.add(this);
    }

    // True if the chart has to be drawn again since its place became wider or narrower.
    fit() {
      const width = printing ? Math.min(this.place.clientWidth, PRINTED) : this.place.clientWidth;
      const changed = Math.abs(width - this.width) >= 1;
      this.width = width;
      return changed && width > 0;
    }

    destroy() {
      this.observer.disconnect();
      drawn.delete(this);
      this.place.replaceChildren();
      delete this.place.chart;
    }

    // Lines of text beside a point of the plot, inside of its edges.
    show(left, top, lines) {
      this.tip.replaceChildren(...lines.map(({ text, bold, swatch }) => {
        const line = element("div");
        if (swatch) { const mark = element("span", { class: "swatch" }); mark.style.background = swatch; line.append(mark); }
        line.append(bold ? element("b", {}, text) : text);
        return line;
      }));
      this.tip.hidden = false;
      const { offsetWidth: width, offsetHeight: height } = this.tip;
      const x = left + 14 + width > this.plot.clientWidth ? Math.max(0, left - 14 - width) : left + 14;
      this.tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(clamp(top - height - 10, 0, Math.max(0, this.plot.clientHeight - height)))}px)`;
    }

    leave() { this.tip.hidden = true; }
  }

  // -- lines -----------------------------------------------------------------------------------------------------
  // One axis. uPlot gets coordinates near 1 (logarithms, or values over a power of ten), since its ticks end at 17 digits.
  class Axis {
    constructor(given, values) {
      this.given = given;
      const positive = values.low > 0 || values.positive < Infinity;
      this.log = Boolean(given.log) && positive;
      let [low, high] = this.log ? [values.positive, values.high] : [values.low, values.high];
      if (!(low <= high)) [low, high] = [0, 1];
      if (given.zero && !this.log) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
      if (given.min !== undefined && !this.log) low = given.min;
      if (given.max !== undefined) high = given.max;
      const size = Math.max(Math.abs(low), Math.abs(high));
      this.unit = this.log || !(size > 0) ? 1 : 10 ** clamp(Math.floor(Math.log10(size)), -300, 300);
      [low, high] = [this.forward(low), this.forward(high)];
      if (!(high > low)) {
        const around = this.log ? 0.3 : Math.max(Math.abs(high) * 0.5, 0.5);
        [low, high] = given.zero && low >= 0 && !this.log ? [0, high + around] : [low - around, high + around];
      } else if (given.pad !== false) {
        const room = 0.04 * (high - low);
        if (given.min === undefined && !(given.zero && low === 0)) low -= room;
        if (given.max === undefined && !(given.zero && high === 0)) high += room;
      }
      this.range = [low, high];
    }

    forward(value) { return this.log ? Math.log10(value) : value / this.unit; }
    backward(value) { return this.log ? 10 ** value : value * this.unit; }
    drawable(value) { return finite(value) && (!this.log || value > 0); }

    ticks(low, high, count) {
      const [from, to] = [this.backward(low), this.backward(high)];
      const found = this.log ? logTicks(from, to, count) : linearTicks(low, high, count).map((one) => one * this.unit);
      return (this.given.whole && !this.log ? found.filter((one) => Math.abs(one - Math.round(one)) < 1e-6) : found).map((one) => this.forward(one));
    }

    label(coordinate) {
      if (this.log && this.range[1] - this.range[0] > 5) return power(Math.round(coordinate));
      return number(Number(this.backward(coordinate).toPrecision(10)), { digits: 4, percent: this.given.percent });
    }
  }

  // The range of all values: lowest, highest, lowest above zero. `from`, `to`: of points between these only.
  function extent(series, pick, from = -Infinity, to = Infinity) {
    const found = { low: Infinity, high: -Infinity, positive: Infinity };
    for (const { x, y, hidden } of series) {
      if (hidden) continue;
      const values = pick === "x" ? x : y;
      const start = Math.max(0, search(x, from)), end = Math.min(x.length, search(x, to) + 2);
      for (let i = start; i < end; i++) {
        const value = values[i];
        if (!finite(value)) continue;
        if (value < found.low) found.low = value;
        if (value > found.high) found.high = value;
        if (value > 0 && value < found.positive) found.positive = value;
      }
    }
    return found;
  }

  // A chart of lines. set({x, y, series, title, label, legend, note, onZoom}):
  //   x, y: {label, log, percent, zero, whole, min, max};
  //   series: [{name, x, y, colour, dash, width, step, fill, faint, vertical, markers, lone, unlisted}], each with its own x;
  //   lone: "diamond", "solid" (a filled one) or "bar", a mark at every point and no line; unlisted: not in the legend.
  class Lines extends Chart {
    constructor(place, height = 300) {
      super(place);
      this.height = height;
      this.zoom = null;
      this.hidden = new Set();
      this.at = null; // {series, point} under the pointer or chosen by arrow keys
      this.title = element("p", { class: "chart-title" });
      this.dot = element("div", { class: "dot" });
      this.band = element("div", { class: "band" });
      this.reset = element("button", { type: "button", class: "reset" }, "Reset zoom");
      for (const one of [this.dot, this.band, this.reset, this.title]) one.hidden = true;
      this.legend = element("ul", { class: "legend" });
      this.notes = element("p", { class: "chart-note" });
      this.table = element("details", { class: "values" }, element("summary", {}, "Table of values"), element("div", { class: "scroll" }));
      place.prepend(this.title);
      this.plot.append(this.band, this.dot, this.reset);
      place.append(this.legend, this.notes, this.table);
      this.reset.addEventListener("click", () => { this.zoomTo(null); this.plot.focus(); });
      this.table.addEventListener("toggle", () => this.tabulate());
      this.plot.addEventListener("dblclick", () => this.zoomTo(null));
      for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) this.plot.addEventListener(kind, (event) => this.pointer(event));
    }

    set(spec) {
      this.spec = spec;
      const short = shorten(spec.series.map((one) => one.name), 44);
      this.series = spec.series.map((one, i) => ({ ...one, short: short[i], hidden: this.hidden.has(one.name) }));
      this.title.textContent = spec.title || "";
      this.title.hidden = !spec.title;
      this.plot.setAttribute("aria-label", `${spec.label || ""} Arrow keys move along the curves, plus and minus zoom, Escape resets.`);
      this.fit();
      this.listed();
      this.render();
      this.tabulate();
    }

    // -- drawing
    render() {
      if (!this.spec || this.width <= 0) return;
      const { x, y } = this.spec;
      const every = extent(this.series, "x");
      const [from, to] = this.zoom || [x.min ?? every.low, x.max ?? every.high];
      this.x = new Axis({ ...x, min: this.zoom ? from : x.min, max: this.zoom ? to : x.max, pad: false }, this.zoom ? { low: from, high: to, positive: from } : every);
      const values = extent(this.series, "y", from, to);
      if (this.spec.shared) for (const one of ["low", "positive"]) values[one] = Math.min(values[one], this.spec.shared[one]);
      if (this.spec.shared) values.high = Math.max(values.high, this.spec.shared.high);
      this.y = new Axis(y, values);
      this.say();
      const key = JSON.stringify([this.series.map(({ width, dash }) => [width, dash]), this.height, x.label, y.label, theme() === DARK]);
      const data = [null, ...this.series.map(() => [[0], [0]])]; // paths are made from the series themselves
      if (!this.series.length) { this.clear(); return; }
      if (this.drawnAs !== key) { this.clear(); this.drawnAs = key; this.make(data); return; }
      this.u.batch(() => {
        if (this.u.width !== this.width) this.u.setSize({ width: this.width, height: this.height });
        this.u.setScale("x", { min: this.x.range[0], max: this.x.range[1] });
        this.u.setScale("y", { min: this.y.range[0], max: this.y.range[1] });
        this.u.redraw(true, true);
      });
    }

    clear() {
      if (this.u) { this.u.destroy(); this.u = null; this.drawnAs = null; }
    }

    make(data) {
      const font = FONT;
      const axis = (which, side) => ({
        scale: which, side, stroke: () => theme().ink, font, labelFont: font, label: this.spec[which].label && cut(this.spec[which].label, Math.floor((which === "x" ? this.width : this.height - 50) / 6.4)),
        labelSize: 20, gap: 5, ticks: { show: false }, grid: { stroke: () => theme().line, width: 1 },
        splits: (u, i, low, high) => this[which].ticks(low, high, which === "x" ? this.width / 90 : this.height / 46),
        values: (u, splits) => splits.map((one) => this[which].label(one)),
        incrs: () => [5, 10, 100, 1000, 1e4, 1e6, 1e9, 1e12, 1e15], space: () => 0, size: which === "x" ? 24 : (u, texts) => 12 + Math.max(8, ...(texts || []).map((text) => this.measure(text))),
      });
      this.u = new window.uPlot({
        mode: 2, width: this.width, height: this.height, legend: { show: false }, cursor: { show: false }, padding: [8, 22, 0, 0],
        scales: {
          x: { time: false, auto: false, range: () => this.x.range }, y: { auto: false, range: () => this.y.range },
        },
        axes: [axis("x", 2), axis("y", 3)],
        series: [null, ...this.series.map((one, i) => ({
          facets: [{ scale: "x", auto: true }, { scale: "y", auto: true }], points: { show: false }, cap: "round",
          stroke: () => (this.series[i].fill ? "transparent" : colour(this.series[i].colour)), fill: () => theme().band,
          width: one.width || 2, dash: DASHES[(one.dash || 0) % DASHES.length], paths: (u, place) => this.path(u, this.series[place - 1]),
        }))],
        hooks: { draw: [(u) => this.marks(u)] },
      }, data, (u, start) => { this.plot.prepend(u.root); start(); });
      this.emphasize();
    }

    measure(text) {
      const context = Lines.context || (Lines.context = document.createElement("canvas").getContext("2d"));
      context.font = FONT;
      return context.measureText(text).width;
    }

    // The curve of one series in pixels of the canvas; a gap where a value cannot be drawn.
    path(u, one) {
      if (one.hidden) return null;
      const { left, top, width, height } = u.bbox, { x: sx, y: sy } = u.scales;
      const across = (v) => clamp(left + (width * (this.x.forward(v) - sx.min)) / (sx.max - sx.min), -1e5, 1e5);
      const down = (v) => clamp(top + height - (height * (this.y.forward(v) - sy.min)) / (sy.max - sy.min), -1e5, 1e5);
      const stroke = new Path2D(), fill = one.fill ? new Path2D() : null;
      const { x, y } = one, base = this.y.log ? top + height : down(0);
      let pen = false, last = 0;
      for (let i = 0; i < x.length; i++) {
        if (!this.y.drawable(y[i]) || !this.x.drawable(x[i])) { if (pen && fill) { fill.lineTo(across(x[i - 1]), base); } pen = false; continue; }
        const px = across(x[i]), py = down(y[i]);
        if (one.lone) { this.mark(stroke, px, py, one.lone); continue; }
        if (pen) {
          if (one.step) stroke.lineTo(px, last);
          stroke.lineTo(px, py);
          if (fill) fill.lineTo(px, py);
        } else {
          stroke.moveTo(px, py);
          if (fill) { fill.moveTo(px, base); fill.lineTo(px, py); }
          const next = i + 1 < x.length && this.y.drawable(y[i + 1]);
          if (!next && !one.markers) this.marker(stroke, px, py); // a value of its own
        }
        if (one.markers) this.marker(stroke, px, py);
        pen = true;
        last = py;
      }
      if (pen && fill) fill.lineTo(across(x[x.length - 1]), base);
      return { stroke: fill ? null : stroke, fill, clip: null, band: null, gaps: null, flags: 1 };
    }

    // A mark of its own: no line leads to it.
    mark(path, x, y, kind) {
      const unit = window.devicePixelRatio;
      if (kind === "bar") { path.moveTo(x - 9 * unit, y); path.lineTo(x + 9 * unit, y); return; }
      for (const size of kind === "solid" ? [5, 3, 1] : [5]) {
        path.moveTo(x - size * unit, y);
        path.lineTo(x, y - size * unit);
        path.lineTo(x + size * unit, y);
        path.lineTo(x, y + size * unit);
        path.closePath();
      }
    }

    // A small disk, from which the line continues.
    marker(path, x, y) {
      const radius = 1.5 * window.devicePixelRatio;
      path.moveTo(x + radius, y);
      path.arc(x, y, radius, 0, 2 * Math.PI);
      path.moveTo(x, y);
    }

    // A dashed red line where the values of a curve end to be finite.
    marks(u) {
      const ends = this.broken();
      if (!ends.length) return;
      const at = Math.min(...ends.map(({ step }) => step));
      if (!this.x.drawable(at)) return;
      const x = u.valToPos(this.x.forward(at), "x", true), { left, top, width, height } = u.bbox;
      if (x < left - 1 || x > left + width + 1) return;
      const { ctx } = u;
      ctx.save();
      ctx.strokeStyle = theme().bad;
      ctx.lineWidth = 1.5 * window.devicePixelRatio;
      ctx.setLineDash([4 * window.devicePixelRatio, 4 * window.devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.restore();
    }

    // Curves that end in values that are not finite, and the first step of those.
    broken() {
      const found = [];
      for (const one of this.series) {
        if (one.hidden || one.faint || one.lone) continue;
        let i = one.y.length;
        while (i > 0 && !finite(one.y[i - 1])) i--;
        if (i < one.y.length && one.y.length > 1) found.push({ name: one.short, step: one.x[i] });
      }
      return found;
    }

    // What the axes cannot show, in words.
    say() {
      const ends = this.broken(), words = this.spec.note ? [this.spec.note] : [];
      if (ends.length) {
        const names = ends.length < this.series.filter((one) => !one.faint && !one.hidden).length ? ` (${ends.slice(0, 3).map(({ name }) => name).join(", ")}${ends.length > 3 ? ", …" : ""})` : "";
        words.push(`Not a finite number from ${this.spec.x.label || "x"} ${number(Math.min(...ends.map(({ step }) => step)), { digits: 9 })} on${names}.`);
      }
      if (this.spec.y.log && !this.y.log) words.push("No value is above zero: the axis is linear.");
      else if (this.y.log && this.series.some((one) => !one.hidden && one.y.some((v) => finite(v) && v <= 0))) words.push("Values of zero or less are not on the logarithmic axis.");
      this.notes.textContent = words.join(" ");
      this.notes.hidden = !words.length;
      this.notes.classList.toggle("bad", ends.length > 0);
    }

    // -- legend: a button for each curve, or a scale of colours for many
    listed() {
      const named = this.series.filter((one) => !one.faint && !one.unlisted);
      const names = [...new Set(named.map((one) => one.name))];
      this.legend.hidden = this.spec.legend === false || (names.length < 2 && !this.spec.always);
      this.legend.classList.toggle("scale", names.length > LISTED);
      if (this.legend.hidden) return;
      if (names.length > LISTED && typeof named[0].colour === "object") {
        const bar = element("span", { class: "ramp" });
        bar.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map((depth) => colour({ depth })).join(", ")})`;
        const item = element("li", {}, element("span", { class: "end" }, named[0].short), bar, element("span", { class: "end" }, named[named.length - 1].short));
        this.legend.replaceChildren(item, element("li", { class: "soft" }, `${names.length} curves: point at one, or press arrow keys, for its name`));
        return;
      }
      this.legend.replaceChildren(...names.map((name) => {
        const one = named.find((candidate) => candidate.name === name);
        const mark = element("span", { class: one.fill ? "mark fill" : one.lone === "diamond" ? "mark diamond" : "mark" });
        if (one.fill) mark.style.background = theme().band;
        else if (one.lone === "diamond") mark.style.borderColor = colour(one.colour);
        else mark.style.background = this.dashed(one);
        const button = element("button", { type: "button", "aria-pressed": String(!this.hidden.has(name)), title: name }, mark, one.short);
        button.addEventListener("click", () => this.toggle(name, button));
        button.addEventListener("pointerenter", () => { this.over = name; this.emphasize(); });
        button.addEventListener("pointerleave", () => { this.over = null; this.emphasize(); });
        return element("li", {}, button);
      }));
    }

    dashed(one) {
      const dash = DASHES[(one.dash || 0) % DASHES.length], ink = colour(one.colour);
      if (!dash.length) return ink;
      const [on, off] = dash;
      return `repeating-linear-gradient(to right, ${ink} 0 ${on / 1.6}px, transparent ${on / 1.6}px ${(on + off) / 1.6}px)`;
    }

    toggle(name, button) {
      if (this.hidden.has(name)) this.hidden.delete(name); else this.hidden.add(name);
      button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      for (const one of this.series) one.hidden = this.hidden.has(one.name);
      this.render();
    }

    // The curve under the pointer stands out among many.
    emphasize() {
      if (!this.u) return;
      const name = this.over || (this.at && this.series[this.at.series] && this.series[this.at.series].name) || null;
      const key = name || "";
      const many = this.series.length > 5 || Boolean(this.over);
      this.series.forEach((one, i) => {
        const base = one.faint ? 0.3 : 1;
        this.u.series[i + 1].alpha = name && many && one.name !== name ? base * 0.25 : base;
        this.u.series[i + 1].width = (one.width || 2) + (name && many && one.name === name ? 1 : 0);
      });
      if (this.emphasized !== key + many) { this.emphasized = key + many; this.u.redraw(false, false); }
    }

    // -- pointer, keyboard, zoom
    inside(event) {
      const box = this.u.over.getBoundingClientRect();
      return { left: event.clientX - box.left, top: event.clientY - box.top, width: box.width, height: box.height };
    }

    pointer(event) {
      if (!this.u || event.target.closest("button")) return;
      const at = this.inside(event), within = at.left >= 0 && at.left <= at.width && at.top >= 0 && at.top <= at.height;
      if (event.type === "pointerdown" && event.button === 0 && within) {
        this.dragging = { from: at.left, id: event.pointerId };
        this.plot.setPointerCapture(event.pointerId);
      }
      if (event.type === "pointercancel") { this.dragging = null; this.band.hidden = true; return; }
      if (this.dragging) {
        const [low, high] = [this.dragging.from, clamp(at.left, 0, at.width)].sort((a, b) => a - b);
        const wide = high - low > 6;
        this.band.hidden = !wide;
        Object.assign(this.band.style, { left: `${this.u.over.offsetLeft + low}px`, width: `${high - low}px`, top: `${this.u.over.offsetTop}px`, height: `${at.height}px` });
        if (event.type !== "pointerup") { if (wide) { this.leave(); return; } } else {
          this.dragging = null;
          this.band.hidden = true;
          if (wide) { this.zoomTo([low, high].map((px) => this.x.backward(this.u.posToVal(px, "x")))); return; }
        }
      }
      if (within) this.choose(this.nearest(at)); else this.leave();
    }

    // Places of a series' points on the screen; null where nothing is drawn.
    position(series, point) {
      const one = this.series[series];
      if (!one || !this.y.drawable(one.y[point]) || !this.x.drawable(one.x[point])) return null;
      return { left: this.u.valToPos(this.x.forward(one.x[point]), "x"), top: this.u.valToPos(this.y.forward(one.y[point]), "y") };
    }

    nearest(at) {
      const x = this.x.backward(this.u.posToVal(at.left, "x"));
      let best = null, closest = Infinity;
      this.series.forEach((one, i) => {
        if (one.hidden || one.faint || one.fill) return;
        const middle = search(one.x, x);
        for (const point of [middle, middle + 1]) {
          const place = this.position(i, point);
          if (!place || place.left < -2 || place.left > at.width + 2) continue;
          const level = one.step || one.vertical ? clamp(at.top, ...this.between(i, middle)) : place.top;
          const distance = Math.hypot((place.left - at.left) * 0.4, level - at.top);
          if (distance < closest) { closest = distance; best = { series: i, point: one.step && middle >= 0 ? middle : point }; }
        }
      });
      return best;
    }

    between(series, point) {
      const tops = [point, point + 1].map((one) => this.position(series, one)).filter((one) => one !== null).map((one) => one.top);
      return tops.length ? [Math.min(...tops), Math.max(...tops)] : [0, 0];
    }

    choose(at) {
      this.at = at;
      this.emphasize();
      if (!at) { this.leave(); return; }
      const place = this.position(at.series, at.point), one = this.series[at.series];
      if (!place) { this.leave(); return; }
      const left = this.u.over.offsetLeft + place.left, top = this.u.over.offsetTop + place.top;
      this.dot.hidden = false;
      this.dot.style.transform = `translate(${left}px, ${top}px)`;
      this.dot.style.background = colour(one.colour);
      const words = [{ text: `${this.spec.x.label || "x"} ${number(one.x[at.point], { digits: this.spec.x.whole ? 15 : 4 })}` }];
      const others = this.series.filter((other) => !other.hidden && !other.faint && !other.vertical);
      for (const other of others.length <= 5 && !one.vertical ? others : [one]) {
        const point = other === one ? at.point : this.beside(other, one.x[at.point]);
        if (point === null) continue;
        words.push({ text: `${cut(other.name, 60)}: ${number(other.y[point], { percent: this.spec.y.percent })}`, bold: other === one, swatch: other.fill ? theme().band : colour(other.colour) });
      }
      this.show(left, top, words);
    }

    // Index of the point of another curve at the same x, or nearest to it within the spacing of its points.
    beside(other, x) {
      const at = search(other.x, x);
      if (other.step) return at >= 0 && finite(other.y[at]) ? at : null;
      const found = [at, at + 1].filter((i) => i >= 0 && i < other.x.length && finite(other.y[i]));
      return found.length ? found.reduce((a, b) => (Math.abs(other.x[b] - x) < Math.abs(other.x[a] - x) ? b : a)) : null;
    }

    leave() {
      super.leave();
      this.dot.hidden = true;
      this.at = null;
      this.emphasize();
    }

    key(event) {
      if (event.target !== this.plot || !this.u || event.altKey || event.metaKey) return;
      const shown = this.series.map((one, i) => i).filter((i) => !this.series[i].hidden && !this.series[i].faint && !this.series[i].fill);
      const moves = { ArrowLeft: -1, ArrowRight: 1 };
      const at = this.at || (shown.length ? { series: shown[0], point: event.key === "ArrowRight" ? -1 : this.series[shown[0]].x.length } : null);
      if (event.key === "Escape") { if (this.zoom) this.zoomTo(null); else this.leave(); }
      else if (event.key === "+" || event.key === "=" || event.key === "-") this.zoomBy(event.key === "-" ? 2 : 0.5);
      else if (!at) return;
      else if (event.key in moves) this.step(at, moves[event.key] * (event.shiftKey || event.ctrlKey ? 10 : 1));
      else if (event.key === "Home" || event.key === "End") this.step({ ...at, point: event.key === "Home" ? -1 : this.series[at.series].x.length }, event.key === "Home" ? 1 : -1);
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        const next = shown[(shown.indexOf(at.series) + (event.key === "ArrowUp" ? -1 : 1) + shown.length) % shown.length];
        const x = this.series[at.series].x[clamp(at.point, 0, this.series[at.series].x.length - 1)];
        const point = this.beside(this.series[next], x);
        this.choose({ series: next, point: point === null ? 0 : point });
      } else return;
      event.preventDefault();
    }

    // To the next point in view that is drawn.
    step(at, by) {
      const { x } = this.series[at.series], [low, high] = [Math.max(0, this.zoom ? search(x, this.zoom[0]) : 0), this.zoom ? search(x, this.zoom[1]) : x.length - 1];
      let point = clamp(at.point + by, low, high);
      while (point > low && point < high && !this.position(at.series, point)) point += Math.sign(by);
      while (point > low && !this.position(at.series, point)) point--;
      this.choose({ series: at.series, point });
    }

    zoomBy(factor) {
      const every = extent(this.series, "x");
      const [low, high] = this.x.range, middle = this.at ? this.x.forward(this.series[this.at.series].x[this.at.point]) : (low + high) / 2;
      const wanted = [middle - (middle - low) * factor, middle + (high - middle) * factor].map((v) => this.x.backward(v));
      const whole = factor > 1 && wanted[0] <= (this.spec.x.min ?? every.low) && wanted[1] >= (this.spec.x.max ?? every.high);
      this.zoomTo(whole ? null : wanted);
    }

    zoomTo(range) {
      if (range && !(range[1] > range[0])) return;
      this.zoom = range;
      this.reset.hidden = range === null;
      this.leave();
      this.render();
      if (this.spec.onZoom) this.spec.onZoom(range);
    }

    // Forgets the zoom; the next `set` draws.
    unzoom() {
      this.zoom = null;
      this.reset.hidden = true;
    }

    // -- the table of values: every curve at the start, at quarters and at the end, with its extremes
    tabulate() {
      if (!this.table.open || !this.spec) return;
      const { low, high } = extent(this.series, "x");
      const at = [0, 0.25, 0.5, 0.75, 1].map((part) => low + part * (high - low));
      const form = { percent: this.spec.y.percent };
      const head = element("tr", {}, element("th", {}, "curve"), ...at.map((x) => element("th", { class: "n" }, `${this.spec.x.label || "x"} ${number(this.spec.x.whole ? Math.round(x) : x)}`)),
        element("th", { class: "n" }, "smallest"), element("th", { class: "n" }, "largest"));
      const rows = this.series.filter((one) => !one.faint).slice(0, 500).map((one) => {
        const values = one.y.filter(finite);
        const cells = at.map((x) => {
          const i = search(one.x, x), near = [i, i + 1].filter((k) => k >= 0 && k < one.x.length).sort((a, b) => Math.abs(one.x[a] - x) - Math.abs(one.x[b] - x));
          return near.length ? number(one.y[near[0]], form) : "–";
        });
        const ends = values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))].map((v) => number(v, form)) : ["–", "–"];
        return element("tr", {}, element("th", { scope: "row" }, one.name), ...[...cells, ...ends].map((text) => element("td", { class: "n" }, text)));
      });
      this.table.lastElementChild.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    }

    destroy() { this.clear(); super.destroy(); }
  }

  // -- heat maps -------------------------------------------------------------------------------------------------
  // One row for each layer, one column for each bin of steps. set({rows, x, z, low, high, percent, title, label}).
  class HeatMap extends Chart {
    constructor(place) {
      super(place);
      this.title = element("p", { class: "chart-title" });
      this.names = element("div", { class: "rows", "aria-hidden": "true" });
      this.canvas = element("canvas");
      this.ticks = element("div", { class: "ticks", "aria-hidden": "true" });
      this.cell = element("div", { class: "cell" });
      this.scale = element("div", { class: "colours" });
      this.grid = element("div", { class: "grid" }, this.names, this.canvas, this.cell);
      place.prepend(this.title);
      this.plot.classList.add("heat");
      this.plot.prepend(this.grid, this.ticks);
      place.append(this.scale);
      this.cell.hidden = true;
      this.plot.addEventListener("pointermove", (event) => this.pointer(event));
      this.plot.addEventListener("pointerdown", (event) => this.pointer(event));
    }

    set(spec) {
      this.spec = spec;
      this.title.textContent = spec.title || "";
      this.plot.setAttribute("aria-label", `${spec.label || ""} Arrow keys move between layers and steps.`);
      this.fit();
      this.render();
    }

    render() {
      if (!this.spec || this.width <= 0) return;
      const { rows, x, z } = this.spec;
      this.tall = rows.length > 40 ? 16 : 20;
      const room = Math.min(0.42 * this.width, 300);
      const short = shorten(rows, Math.max(12, Math.floor((room - 12) / 6.4)));
      this.margin = Math.min(room, 14 + 6.4 * Math.max(...short.map((text) => text.length)));
      this.names.replaceChildren(...short.map((text, i) => element("div", { class: "row", title: rows[i] }, text)));
      this.names.style.width = `${this.margin}px`;
      this.grid.style.setProperty("--tall", `${this.tall}px`);
      const [across, down] = [Math.max(40, this.width - this.margin), rows.length * this.tall];
      const ratio = window.devicePixelRatio || 1;
      Object.assign(this.canvas, { width: Math.round(across * ratio), height: Math.round(down * ratio) });
      Object.assign(this.canvas.style, { width: `${across}px`, height: `${down}px` });
      const context = this.canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.edges = this.columns(x, across);
      z.forEach((row, i) => row.forEach((value, j) => {
        if (!finite(value)) return;
        context.fillStyle = this.shade(value);
        context.fillRect(this.edges[j], i * this.tall, this.edges[j + 1] - this.edges[j], this.tall - 1);
      }));
      const last = x.length - 1, shown = linearTicks(x[0], x[last], across / 90, true).filter((step) => step >= x[0] && step <= x[last]);
      this.ticks.replaceChildren(...(shown.length ? shown : x.slice(0, 1)).map((step) => {
        const tick = element("span", {}, thousands(step));
        tick.style.left = `${this.margin + this.offset(step, x)}px`;
        return tick;
      }), element("em", {}, "step"));
      const form = { percent: this.spec.percent };
      const bar = element("span", { class: "ramp" });
      bar.style.background = `linear-gradient(to right, ${CIVIDIS.join(", ")})`;
      this.scale.replaceChildren(number(this.spec.low, form), bar, number(this.spec.high, form));
    }

    // Edges of the columns in pixels: halfway between the middles of neighbouring columns.
    columns(x, across) {
      const span = x[x.length - 1] - x[0];
      const room = x.length > 1 ? Math.min(24, across / x.length) : across; // the middles of the outer columns are not on the edge
      const middle = x.map((step) => (span > 0 ? room / 2 + ((step - x[0]) / span) * (across - room) : across / 2));
      this.middle = middle;
      const ratio = window.devicePixelRatio || 1; // on whole pixels: no seams
      return [0, ...middle.slice(1).map((at, i) => Math.round((ratio * (at + middle[i])) / 2) / ratio), across];
    }

    offset(step, x) {
      const j = Math.max(0, search(x, step)), k = Math.min(j + 1, x.length - 1);
      const part = x[k] > x[j] ? (step - x[j]) / (x[k] - x[j]) : 0;
      return this.middle[j] + part * (this.middle[k] - this.middle[j]);
    }

    shade(value) {
      const { low, high } = this.spec;
      const t = high > low ? clamp((value - low) / (high - low), 0, 1) : 1;
      const at = t * (CIVIDIS.length - 1), i = Math.min(Math.floor(at), CIVIDIS.length - 2), part = at - i;
      const [a, b] = [CIVIDIS[i], CIVIDIS[i + 1]].map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)));
      return `rgb(${a.map((v, k) => Math.round(v + part * (b[k] - v))).join(" ")})`;
    }

    pointer(event) {
      if (!this.edges) return;
      const box = this.canvas.getBoundingClientRect();
      const x = event.clientX - box.left, row = Math.floor((event.clientY - box.top) / this.tall);
      if (row < 0 || row >= this.spec.rows.length || x > box.width) { this.leave(); return; }
      this.choose(row, clamp(search(this.edges, Math.max(x, 0)), 0, this.spec.x.length - 1));
    }

    choose(row, column) {
      this.at = [row, column];
      const left = this.margin + this.edges[column], width = Math.max(3, this.edges[column + 1] - this.edges[column]);
      Object.assign(this.cell.style, { left: `${left}px`, top: `${row * this.tall}px`, width: `${width}px`, height: `${this.tall - 1}px` });
      this.cell.hidden = false;
      const value = this.spec.z[row][column];
      this.show(left, row * this.tall - this.grid.scrollTop, [
        { text: this.spec.rows[row], bold: true },
        { text: `step ${thousands(this.spec.x[column])}: ${finite(value) ? number(value, { percent: this.spec.percent }) : "not measured, or not finite"}` },
      ]);
    }

    leave() { super.leave(); this.cell.hidden = true; }

    key(event) {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (event.key === "Escape") { this.leave(); return; }
      if (!(event.key in moves) || !this.spec) return;
      const [row, column] = this.at || [0, -1], [down, right] = moves[event.key], by = event.shiftKey || event.ctrlKey ? 10 : 1;
      this.choose(clamp(row + down * by, 0, this.spec.rows.length - 1), clamp(column + right * by, 0, this.spec.x.length - 1));
      const top = this.at[0] * this.tall;
      if (top < this.grid.scrollTop) this.grid.scrollTop = top;
      else if (top + this.tall > this.grid.scrollTop + this.grid.clientHeight) this.grid.scrollTop = top + this.tall - this.grid.clientHeight;
      event.preventDefault();
    }
  }

  // Several charts of lines side by side in one place, on the same scale; the number may change.
  function multiples(place, specs, height) {
    const old = [...place.children].filter((one) => one.chart);
    if (specs.length === 1 && place.chart instanceof Lines) { place.chart.set(specs[0]); return; }
    if (place.chart) place.chart.destroy();
    if (specs.length === 1) {
      old.forEach((one) => one.chart.destroy());
      place.classList.remove("multiples");
      new Lines(place, height).set(specs[0]);
      return;
    }
    place.classList.add("multiples");
    const shared = { low: Infinity, high: -Infinity, positive: Infinity };
    for (const spec of specs) {
      const found = extent(spec.series, "y");
      for (const one of ["low", "positive"]) shared[one] = Math.min(shared[one], found[one]);
      shared.high = Math.max(shared.high, found.high);
    }
    while (old.length > specs.length) { const one = old.pop(); one.chart.destroy(); one.remove(); }
    specs.forEach((spec, i) => {
      if (!old[i]) { old[i] = element("div", { class: "one" }); place.append(old[i]); new Lines(old[i], height); }
      old[i].chart.set({ ...spec, shared });
    });
  }

  // Charts that the server describes: for each element [data-figure] those of that name.
  function figures(described, root = document) {
    for (const place of root.querySelectorAll("[data-figure]")) {
      const found = described[place.dataset.figure];
      if (found) multiples(place, found, Number(place.dataset.height) || 320);
    }
  }

  // Names each cell of the tables after its column: on narrow screens a row becomes a card (`.cards` in page.css).
  function cards(root = document) {
    for (const table of root.querySelectorAll(".scroll > table")) {
      const head = [...(table.rows[0]?.cells ?? [])];
      if (table.closest(".chart") || !head.length || head.some((cell) => cell.tagName !== "TH")) continue;
      table.classList.add("cards");
      for (const row of [...table.rows].slice(1)) [...row.cells].forEach((cell, i) => { cell.dataset.label = head[i]?.textContent ?? ""; });
    }
  }

  const redraw = () => {
    for (const chart of drawn) { if (chart.spec) { chart.fit(); if (chart.listed) chart.listed(); chart.render(); } }
  };
  dark.addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => { printing = true; redraw(); });
  window.addEventListener("afterprint", () => { printing = false; redraw(); });
  cards();
  const inside = document.getElementById("figures");
  if (inside) figures(JSON.parse(inside.textContent));

  return { Lines, HeatMap, multiples, figures, cards, colour, layerColour, element, finite, LISTED };
})();
