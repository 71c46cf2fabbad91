// Draws the panels of one page. The data is either inside the page (a frozen report) or asked for every second (live).
// Names from runs only become text, never markup.
"use strict";
(() => {
  const { Lines, HeatMap, multiples, figures, cards, colour, layerColour, element, finite } = window.ExciteCharts;
  const { shorten, thousands } = window.ExciteLabels;
  const WAIT = 1000, WORDS_WAIT = 4000; // milliseconds
  const HEIGHT = 290, STEEP = 1e3; // STEEP: a highest value over the median above which an axis starts as logarithmic
  const MARKED = 40; // points of a curve up to which each is marked
  const byId = (id) => document.getElementById(id);
  const state = { runs: [], panels: new Map(), version: null, paused: false, statuses: "" };

  // Colour and dashes of a run. Runs of one group, a way of training, look the same.
  const runLine = (run) => ({ colour: run.group % 7, dash: Math.floor(run.group / 7) % 4 });
  const runNames = () => shorten(state.runs.map((run) => run.label), 44);

  // Whether a few values are so much larger than the others that a linear axis shows nothing but them.
  function steep(curves) {
    const values = curves.flatMap(({ y }) => y.filter((v) => finite(v) && v > 0)).sort((a, b) => a - b);
    return values.length > 2 && values[values.length - 1] > STEEP * values[Math.floor(values.length / 2)];
  }

  // -- one panel -------------------------------------------------------------------------------------------------
  class Panel {
    constructor(described) {
      this.id = described.id;
      this.quantity = null;
      this.layer = null;
      this.zoom = null;
      this.visible = frozen !== null;
      this.chart = element("div", { class: "chart", id: `chart-${this.id}` });
      this.map = element("div", { class: "chart map", id: `chart-map-${this.id}` });
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
      this.log.addEventListener("change", () => { this.log.dataset.chosen = "yes"; this.draw(); });
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
      if (layers.some((one) => one !== "")) options.push(["*", layers.every((one) => ["", "train", "test"].includes(one)) ? "training and test points" : layers.every((one) => ["measured", "expected"].includes(one)) ? "measured and expected" : "all layers"]);
      options.push(...layers.filter((one) => one !== "").map((one) => [`=${one}`, this.role(one) ? `${this.role(one)} (${one})` : one]));
      if (!options.some(([value]) => value === this.layer)) this.layer = options[0][0];
      fill(this.layers, options, this.layer);
    }

    // What a layer does in a transformer, where that is known; its name where several do the same.
    role(layer) { return (this.described.roles || {})[layer] || ""; }

    names(layers) {
      const roles = layers.map((one) => this.role(one));
      return layers.map((one, i) => (roles[i] && roles.indexOf(roles[i]) === roles.lastIndexOf(roles[i]) ? roles[i] : one));
    }

    share() { return /\/(share|deficient|changed|misclassified|censored|accuracy)$/.test(this.quantity); }

    current() { return this.described.quantities.find((q) => q.key === this.quantity); }

    changed() {
      this.zoom = null;
      for (const one of [this.chart, ...this.chart.children]) if (one.chart) one.chart.unzoom();
      this.describe(this.described);
      if (frozen !== null) { this.take(frozen.data); this.draw(); } else poll({ key: this.quantity });
    }

    take(data) {
      if (data[this.quantity]) this.data = { key: this.quantity, ...data[this.quantity] };
    }

    draw() {
      if (!this.data || this.data.key !== this.quantity) return;
      const wanted = this.wanted();
      if (!this.described.log && !this.log.dataset.chosen && !this.share()) this.log.checked = steep(wanted);
      const specs = this.specs(wanted);
      this.apart = specs.length > 1;
      arrange();
      multiples(this.chart, specs, HEIGHT);
      this.heat();
    }

    wanted() {
      return this.data.curves.filter(({ layer }) =>
        this.layer === "" ? layer === "" : this.layer === "*" ? layer !== "" : layer === this.layer.slice(1));
    }

    // What is drawn: one chart, or one for each run if several runs have several layers each.
    specs(wanted) {
      const runs = [...new Set(wanted.map((curve) => curve.run))];
      const layers = this.current().layers.filter((one) => wanted.some((curve) => curve.layer === one));
      const apart = this.layer === "*" && runs.length > 1 && layers.length > 1;
      const called = this.names(layers);
      const byLayer = this.layer === "*" && (apart || runs.length === 1);
      const series = (curves) => curves.flatMap((curve) => {
        const run = state.runs[curve.run], place = layers.indexOf(curve.layer);
        const line = byLayer ? { colour: layerColour(place, layers.length) } : runLine(run);
        const every = curve.raw && wanted.length === 1 ? [{ ...line, ...curve.raw, name: "every step", width: 1, faint: true }] : [];
        return [...every, { ...line, x: curve.x, y: curve.y, name: byLayer ? called[place] : run.label, width: byLayer ? 1.6 : 2 }];
      });
      const common = {
        x: { label: "step", whole: true },
        y: { label: this.current().name.split(" (")[0], log: this.log.checked, percent: this.share(), zero: this.described.known },
        label: this.spoken(), onZoom: (range) => this.zoomed(range), always: byLayer && layers.length > 1,
      };
      if (!apart) return [{ ...common, series: series(wanted) }];
      const names = runNames();
      return runs.map((index) => ({ ...common, title: names[index], series: series(wanted.filter((curve) => curve.run === index)) }));
    }

    heat() {
      const maps = (this.data.maps || []).filter((one) => one.x.length);
      this.map.hidden = maps.length === 0;
      const share = this.share(), values = maps.flatMap((one) => one.z.flat()).filter(finite);
      const high = share ? 1 : values.reduce((a, b) => Math.max(a, b), 0), names = runNames();
      while (this.map.children.length > maps.length) { this.map.lastElementChild.chart.destroy(); this.map.lastElementChild.remove(); }
      maps.forEach((one, i) => {
        if (!this.map.children[i]) { this.map.append(element("div")); new HeatMap(this.map.lastElementChild); }
        this.map.children[i].chart.set({
          rows: this.names(one.layers), x: one.x, z: one.z, low: 0, high, percent: share,
          title: maps.length > 1 ? names[one.run] : `${this.current().name} of each layer`,
          label: `Heat map: ${this.current().name} by layer and step. ${this.spoken()}`,
        });
      });
    }

    // What a chart shows last, for those who do not see it.
    spoken() {
      const parts = this.data.curves.slice(0, 12).map(({ run, layer, y }) =>
        `${state.runs[run].label}${layer ? ` ${this.names([layer])[0]}` : ""} ${y.length && y[y.length - 1] !== null ? y[y.length - 1] : "no value"}`);
      return `${this.described.title}, ${this.current().name}. Last values: ${parts.join("; ")}.`;
    }

    // Zoomed in: ask for the points in between, and leave this panel as it is until it is reset.
    zoomed(range) {
      if (frozen !== null) return;
      this.zoom = range && range.map((step) => Math.max(step, 0));
      poll(range ? { key: this.quantity, low: this.zoom[0], high: this.zoom[1] } : { key: this.quantity });
    }
  }

  // -- the first chart: margins of training and test points over time, and their gap -----------------------------
  const WORDS = { train: "training", test: "test" };

  // Measurements of another number of points than the curve: marks that no line joins. "500", or "" for several numbers.
  function apart(one, part) {
    const found = (one.apart || []).filter((each) => each[part] !== undefined && each[part] !== null);
    const sizes = [...new Set(found.map(({ points }) => points))];
    return { x: found.map(({ step }) => step), y: found.map((each) => each[part]), count: sizes.length === 1 ? thousands(sizes[0]) : "" };
  }

  function marginHistory(found) {
    const section = byId("margin-history");
    section.hidden = !found.length;
    if (!found.length) return;
    const several = state.runs.length > 1, names = runNames();
    const look = (one, part) => (several ? { colour: runLine(state.runs[one.run]).colour } : { colour: { train: 0, test: 1, gap: 2 }[part] });
    const marks = (one, part) => {
      const { x, y, count } = apart(one, part), many = count || "more", what = WORDS[part] ? `${many} ${WORDS[part]} points` : `${part}, ${many} points`;
      return x.length ? [{ x, y, ...look(one, part), lone: several && part === "train" ? "solid" : "diamond", unlisted: several, name: several ? `${names[one.run]}, ${what}` : what }] : [];
    };
    const medians = found.flatMap((one) => ["train", "test"].filter((part) => one[part]).flatMap((part) => [
      { ...one[part], ...look(one, part), dash: several && part === "test" ? 1 : 0, name: several ? `${names[one.run]}, ${WORDS[part]}` : `${one.points ? `${thousands(one.points)} ` : ""}${WORDS[part]} points` },
      ...marks(one, part),
    ]));
    const gaps = [...chances(found, several), ...found.filter((one) => one.gap).flatMap((one) => [
      { ...one.gap, ...(several ? runLine(state.runs[one.run]) : look(one, "gap")), name: several ? names[one.run] : one.points ? `gap, ${thousands(one.points)} points` : "gap" }, ...marks(one, "gap"),
    ])];
    const single = found.flatMap((one) => (one.apart || []).map(({ step }) => step)), steps = [...single, ...medians.flatMap((one) => one.x)];
    const [first, end] = [Math.min(...steps), Math.max(...steps)];
    const x = { label: "step", whole: true, ...(single.includes(end) && end > first ? { max: end + 0.03 * (end - first) } : {}) }; // room for the mark
    const which = several ? " (filled: training, open: test)" : "";
    const note = single.length ? `Diamonds${which} are measurements of another sample, such as the larger one at the end: no line joins them, since a step from one sample to another is no change of the network.` : "";
    const last = (one, part) => [...apart(one, part).y.slice(-1), ...((one[part] || { y: [] }).y.slice(-1)), null].find(finite) ?? "no value";
    const spoken = found.map((one) => `${state.runs[one.run].label}: median margin training ${last(one, "train")}, test ${last(one, "test")}, gap ${last(one, "gap")}.`).join(" ");
    draw("chart-median-margins", medians, { x, y: { label: "median margin", zero: true }, label: spoken, note });
    draw("chart-margin-gap", gaps, { x, y: { label: "gap of the curves", zero: true }, label: spoken, note: chanceNote(found, several, gaps) });
  }

  // The chance level is that of the number of points. Several runs share one band only if it is right for all of them.
  const levels = (found) => [...new Set(found.filter((one) => one.chance).flatMap((one) => one.chance.y.filter(finite)))];

  function chances(found, several) {
    const held = found.filter((one) => one.chance);
    const sizes = [...new Set(held.map(({ points }) => points))], grey = { colour: 6, fill: true, name: `chance level${sizes.length === 1 && sizes[0] ? `, ${thousands(sizes[0])} points` : ""}` };
    const ends = held.map((one) => apart(one, "chance")), count = [...new Set(ends.filter(({ x }) => x.length).map((one) => one.count))];
    const same = [...new Set(ends.flatMap(({ y }) => y))].length <= 1;
    const bars = ends.some(({ x }) => x.length) && (!several || same)
      ? [{ x: ends.flatMap(({ x }) => x).sort((a, b) => a - b), y: ends.flatMap(({ y }) => y), colour: 6, lone: "bar", name: `chance level, ${count.length === 1 && count[0] ? count[0] : "more"} points` }] : [];
    const band = (one) => (one.x.length > 1 ? { ...one, ...grey } : { ...one, ...grey, fill: false, lone: "bar" }); // one point has no width
    if (!several) return [...held.map((one) => band(one.chance)), ...bars];
    const level = levels(held), steps = held.flatMap((one) => one.chance.x);
    if (level.length !== 1 || held.length !== found.length) return bars;
    const reach = [...new Set([Math.min(...steps), Math.max(...steps)])];
    return [band({ x: reach, y: reach.map(() => level[0]) }), ...bars];
  }

  function chanceNote(found, several, gaps) {
    const drawn = gaps.some((one) => one.fill);
    return several && !drawn && levels(found).length > 1 ? "The chance level differs between these runs, since they measured different numbers of points: the page of each run shows it." : "";
  }

  function draw(id, series, spec) {
    const place = byId(id);
    place.hidden = !series.length;
    const marked = series.map((one) => ({ ...one, markers: one.x.length <= MARKED && !one.dash && !one.lone }));
    if (series.length) (place.chart || new Lines(place, 230)).set({ ...spec, series: marked, always: true });
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
    if (answer.margins) marginHistory(answer.margins);
    if (answer.panels) {
      const there = new Set(answer.panels.map(({ id }) => id));
      for (const panel of state.panels.values()) panel.section.hidden = !there.has(panel.id);
      arrange();
    }
    if (answer.data) for (const panel of state.panels.values())
      if (answer.data[panel.quantity]) { panel.take(answer.data); panel.draw(); }
  }

  // Links of a sentence to its chart on this page and to the documentation.
  function links({ link, docs }) {
    const found = [];
    if (link && /^#[\w-]+$/.test(link)) found.push(" ", element("a", { href: link }, "chart"));
    if (docs && /^https?:\/\//.test(docs)) found.push(" ", element("a", { href: docs }, "documentation"));
    return found;
  }

  function showFindings(findings) {
    const marks = { warning: "Warning:", good: "Good:" };
    const runs = [...new Set(findings.map((one) => one.run))];
    const lists = runs.map((run) => {
      const list = element("ul");
      for (const one of findings.filter((each) => each.run === run)) {
        const item = element("li", { class: one.kind });
        if (marks[one.kind]) item.append(element("b", {}, marks[one.kind]));
        item.append(one.text, ...(one.action ? [" ", element("span", { class: "todo" }, one.action)] : []), ...links(one));
        if (one.docs) item.title = one.docs;
        list.append(item);
      }
      if (runs.length === 1 && state.runs.length === 1) return list;
      const head = element("h3");
      head.textContent = run;
      return element("div", {}, head, list);
    });
    byId("findings").hidden = findings.length === 0;
    const place = byId("findings-list"), key = JSON.stringify(findings);
    place.classList.toggle("side", lists.length > 1);
    if (place.dataset.shown !== key) { place.dataset.shown = key; place.replaceChildren(...lists); }
  }

  const holder = byId("frozen");
  const frozen = holder ? JSON.parse(holder.textContent) : null;
  let watcher = null, poll = () => {};
  if (frozen !== null) {
    update(frozen);
    figures(frozen.figures);
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
      swatch.style.background = colour(runLine(run).colour);
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

  const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
  let sayAgain = -Infinity, saidVersion = null;

  async function extras() {
    const statuses = state.runs.map((run) => run.status).join();
    const started = performance.now();
    if (state.version !== saidVersion && started > sayAgain) {
      saidVersion = state.version;
      const asked = ask("/api/verdict").catch(() => ({ html: "" })); // findings are shown in any case
      const { findings } = await ask("/api/findings"), said = await asked;
      showFindings(findings);
      const place = byId("verdict-place");
      if (said.html && place.dataset.shown !== said.html) { place.dataset.shown = said.html; place.innerHTML = said.html; cards(place); } // made and escaped by the server's templates
      sayAgain = performance.now() + Math.max(WORDS_WAIT, 5 * (performance.now() - started));
    }
    if (statuses !== state.statuses) {
      state.statuses = statuses;
      const found = await ask("/api/details");
      byId("top").innerHTML = found.top; // these are made and escaped by the server's templates
      byId("bottom").innerHTML = found.bottom;
      cards(byId("top")), cards(byId("bottom"));
      figures(found.figures);
    }
  }

  // The page comes with a few values of the first series, which are drawn at once; then all of them are asked for.
  async function live() {
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
