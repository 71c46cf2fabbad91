// The list of runs, kept up to date. Ticked boxes and the focus stay where they are.
"use strict";
(() => {
  const body = document.querySelector("#runs tbody"), filter = document.getElementById("filter");
  const compare = document.getElementById("compare"), link = document.getElementById("link");
  const rows = new Map();

  function cell(kind) {
    const made = document.createElement("td");
    made.className = kind;
    return made;
  }

  function ago(seconds) {
    if (seconds === null) return "no data yet";
    const age = Math.max(0, Date.now() / 1000 - seconds);
    if (age < 90) return `${Math.round(age)} s ago`;
    if (age < 5400) return `${Math.round(age / 60)} min ago`;
    return age < 129600 ? `${Math.round(age / 3600)} h ago` : new Date(seconds * 1000).toISOString().slice(0, 10);
  }

  function make(run) {
    const row = document.createElement("tr");
    const box = document.createElement("input");
    Object.assign(box, { type: "checkbox", name: "run", value: run.id });
    box.setAttribute("aria-label", `compare ${run.label}`);
    const opening = document.createElement("a");
    opening.href = `/view?${new URLSearchParams({ run: run.id })}`;
    opening.textContent = run.label;
    const cells = [cell(""), cell("name"), cell("status"), cell("n"), cell("n"), cell("soft")];
    cells[0].append(box);
    cells[1].append(opening);
    row.append(...cells);
    return { row, box, cells };
  }

  function show(run, { cells }) {
    cells[2].className = `status ${run.status}`;
    const why = document.createElement("div");
    why.className = "reason";
    why.textContent = run.reason || "";
    cells[2].replaceChildren(run.status, ...(run.reason ? [why] : []));
    cells[3].textContent = run.step === null ? "" : run.step.toLocaleString("en-US");
    cells[4].textContent = run.loss === null ? "" : run.loss.toPrecision(3);
    cells[5].textContent = ago(run.updated);
  }

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
      runs.forEach((run, i) => {
        if (!rows.has(run.id)) rows.set(run.id, make(run));
        const made = rows.get(run.id);
        show(run, made);
        if (body.children[i] !== made.row && !made.row.contains(document.activeElement)) body.insertBefore(made.row, body.children[i] || null);
      });
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
