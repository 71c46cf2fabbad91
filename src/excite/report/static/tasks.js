// Sweeps and studies under way: how many tasks run, are done or failed, and what is to be read about it.
"use strict";
(() => {
  const place = document.getElementById("tasks");
  const made = new Map();

  function element(kind, words, name) {
    const one = document.createElement(kind);
    if (words) one.textContent = words;
    if (name) one.className = name;
    return one;
  }

  function long(seconds) {
    if (seconds < 60) return `${Math.round(seconds)} s`;
    return seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
  }

  function words(sweep) {
    const parts = ["running", "done", "failed", "waiting"].filter((kind) => sweep.counts[kind]).map((kind) => `${sweep.counts[kind]} ${kind}`);
    return `${sweep.total} tasks: ${parts.join(", ")}${sweep.left === null ? "" : `; about ${long(sweep.left)} left`}`;
  }

  function make(sweep) {
    const box = element("section", "", "sweep");
    const head = element("h2"), line = element("p", "", "note"), bar = element("progress"), list = element("ul", "", "soft");
    bar.setAttribute("aria-label", `done of ${sweep.label}`);
    box.append(head, bar, line, list);
    return { box, head, line, bar, list };
  }

  function show(sweep, { head, line, bar, list }) {
    head.replaceChildren(element("span", sweep.label), " ", element("span", sweep.state, `status ${sweep.state}`));
    line.textContent = words(sweep);
    bar.max = Math.max(sweep.total, 1);
    bar.value = sweep.done;
    list.replaceChildren(
      ...sweep.failed.map((task) => element("li", `${task.name} failed: ${task.reason} (log: ${task.log})`)),
      ...sweep.running.map((task) => element("li", `${task.name}: ${task.phase}, ${Math.round(100 * task.share)} %`)),
    );
  }

  async function refresh() {
    try {
      const answer = await fetch("/api/tasks");
      if (!answer.ok) throw new Error((await answer.text()).trim());
      const { sweeps } = await answer.json();
      for (const [id, { box }] of made) if (!sweeps.some((sweep) => sweep.id === id)) { box.remove(); made.delete(id); }
      sweeps.forEach((sweep, i) => {
        if (!made.has(sweep.id)) made.set(sweep.id, make(sweep));
        const one = made.get(sweep.id);
        show(sweep, one);
        if (place.children[i] !== one.box) place.insertBefore(one.box, place.children[i] || null);
      });
    } catch {
      // the list of runs says that there is no answer
    }
    setTimeout(refresh, 2000);
  }
  refresh();
})();
