// The list of runs, kept up to date. Ticked boxes and the focus stay where they are.
"use strict";
(() => {
  const { number, thousands } = window.ExciteLabels;
  const body = document.querySelector("#runs tbody"), filter = document.getElementById("filter");
  const compare = document.getElementById("compare"), link = document.getElementById("link");
  const rows = new Map();
  const SVG = "http://www.w3.org/2000/svg", WIDE = 96, TALL = 24;
  const sorting = { by: "updated", down: true };

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function ago(seconds) {
    if (seconds === null) return "no data yet";
    const age = Math.max(0, Date.now() / 1000 - seconds);
    if (age < 90) return `${Math.round(age)} s ago`;
    if (age < 5400) return `${Math.round(age / 60)} min ago`;
    return age < 129600 ? `${Math.round(age / 3600)} h ago` : new Date(seconds * 1000).toISOString().slice(0, 10);
  }

  // A small curve without axes; a gap where a value is not finite.
  function sparkline({ name, values }) {
    const finite = values.filter((v) => v !== null);
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    const svg = document.createElementNS(SVG, "svg");
    const title = document.createElementNS(SVG, "title");
    const words = name === "loss/step" ? "loss" : "median margin of test points";
    title.textContent = finite.length ? `${words}: from ${number(finite[0])} to ${number(finite[finite.length - 1])}` : `${words}: not finite`;
    for (const [key, value] of Object.entries({ width: WIDE, height: TALL, viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": title.textContent, class: "sparkline" })) svg.setAttribute(key, value);
    let path = "", pen = "M";
    values.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      const x = 2 + ((WIDE - 4) * i) / Math.max(values.length - 1, 1), y = high > low ? TALL - 3 - ((TALL - 6) * (value - low)) / (high - low) : TALL / 2;
      path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      if (pen === "M") path += `l0.01 0`;
      pen = "L";
    });
    const line = document.createElementNS(SVG, "path");
    line.setAttribute("d", path);
    svg.append(title, line);
    return svg;
  }

  // One entry for each column: its key, its class, and what a row shows.
  const COLUMNS = [
    ["name", "name", null],
    ["status", "status", null],
    ["margin", "n", (run) => run.margin_text || (run.margin === null ? "" : number(run.margin, { digits: 3 }))],
    ["gap", "n", (run) => (run.gap === null ? "" : run.gap.toFixed(2))],
    ["accuracy", "n", (run) => (run.accuracy === null ? "" : `${(100 * run.accuracy).toFixed(1)}%`)],
    ["alerts", "n", (run) => (run.alerts ? String(run.alerts) : "")],
    ["spark", "", null],
    ["step", "n", (run) => (run.step === null ? "" : thousands(run.step))],
    ["loss", "n", (run) => (run.loss === null ? "" : number(run.loss, { digits: 3 }))],
    ["updated", "soft", (run) => ago(run.updated)],
  ];
  const LABELS = { margin: "margin", gap: "gap", accuracy: "accuracy", alerts: "alerts", step: "step", loss: "loss" };

  function make(run) {
    const row = element("tr"), box = element("input", { type: "checkbox", name: "run", value: run.id, "aria-label": `compare ${run.label}` });
    const opening = element("a", { href: `/view?${new URLSearchParams({ run: run.id })}` }, run.label);
    const cells = Object.fromEntries(COLUMNS.map(([key, kind]) => [key, element("td", { class: `${kind} ${key}`.trim(), ...(LABELS[key] ? { "data-label": LABELS[key] } : {}) })]));
    cells.name.append(opening);
    row.append(element("td", { class: "box" }, box), ...Object.values(cells));
    return { row, box, cells };
  }

  function show(run, made) {
    const { row, cells } = made;
    made.run = run;
    row.classList.toggle("diverged", run.status === "diverged");
    cells.status.className = `status ${run.status}`;
    cells.status.replaceChildren(run.status, ...(run.reason ? [element("div", { class: "reason" }, run.reason)] : []));
    for (const [key, , text] of COLUMNS) if (text) cells[key].textContent = text(run);
    const within = run.gap !== null && run.chance !== null && run.gap <= run.chance;
    cells.gap.classList.toggle("within", within);
    cells.gap.title = run.gap === null || run.chance === null ? "" : `${within ? "within" : "above"} the chance level ${run.chance.toFixed(2)}`;
    cells.alerts.classList.toggle("some", run.alerts > 0);
    const drawn = JSON.stringify(run.spark || null);
    if (cells.spark.dataset.drawn !== drawn) {
      cells.spark.dataset.drawn = drawn;
      cells.spark.replaceChildren(...(run.spark && run.spark.values.length ? [sparkline(run.spark)] : []));
    }
  }

  // -- sorting: by a column's button; runs without a value come last
  function value(run) {
    return sorting.by === "name" ? run.label : sorting.by === "status" ? run.status : run[sorting.by] ?? null;
  }

  function compared(a, b) {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return (sorting.down ? -order : order) || a.label.localeCompare(b.label, "en", { numeric: true });
  }

  function arrange() {
    const sorted = [...rows.values()].sort((a, b) => compared(a.run, b.run));
    sorted.forEach(({ row }, i) => {
      if (body.children[i] !== row && !row.contains(document.activeElement)) body.insertBefore(row, body.children[i] || null);
    });
    for (const head of document.querySelectorAll("#runs th[data-key]"))
      head.setAttribute("aria-sort", head.dataset.key !== sorting.by ? "none" : sorting.down ? "descending" : "ascending");
  }

  for (const head of document.querySelectorAll("#runs th[data-key]"))
    head.querySelector("button").addEventListener("click", () => {
      const text = ["name", "status"].includes(head.dataset.key); // names start at A, numbers with the largest
      Object.assign(sorting, sorting.by === head.dataset.key ? { down: !sorting.down } : { by: head.dataset.key, down: !text });
      arrange();
    });

  function count() {
    const ticked = [...rows.values()].filter(({ box }) => box.checked).length;
    compare.disabled = ticked === 0;
    compare.textContent = ticked > 1 ? `Compare ${ticked} runs` : ticked ? "Open" : "Compare";
  }

  function sift() {
    const wanted = filter.value.trim().toLowerCase();
    for (const [id, { row, box }] of rows) row.hidden = !box.checked && !id.toLowerCase().includes(wanted);
  }

  async function refresh() {
    try {
      const answer = await fetch("/api/runs");
      if (!answer.ok) throw new Error((await answer.text()).trim());
      const { runs, cut } = await answer.json();
      const there = new Set(runs.map((run) => run.id));
      for (const [id, { row }] of rows) if (!there.has(id)) { row.remove(); rows.delete(id); }
      for (const run of runs) {
        if (!rows.has(run.id)) rows.set(run.id, make(run));
        show({ margin: null, gap: null, chance: null, accuracy: null, alerts: 0, ...run }, rows.get(run.id));
      }
      arrange();
      document.getElementById("empty").hidden = runs.length > 0;
      link.textContent = cut ? `the first ${runs.length} runs` : "";
      sift();
      count();
    } catch (error) {
      link.textContent = `No response: ${error.message}. Retrying.`;
    }
    setTimeout(refresh, 2000);
  }
  body.addEventListener("change", count);
  filter.addEventListener("input", sift);
  refresh();
})();
