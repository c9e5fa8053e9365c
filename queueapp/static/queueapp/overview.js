// Keeps the overview fresh: asks for its rows every five seconds while the page is visible, and replaces the cells that
// differ. A cell with the focus, selected text or an open menu stays as it is, and then the order of the rows as well.
// Without this script the page shows what was true when it was loaded.
"use strict";

(() => {
  const EVERY_MS = 5000;
  const LIMIT_MS = 10000;
  const table = document.getElementById("result_list");
  const status = document.getElementById("queueapp-refreshed");
  const shown = new WeakMap();
  let timer = 0;
  let last = Date.now();

  function inUse(element) {
    const selection = getSelection();
    return element.contains(document.activeElement) || element.querySelector("details[open]") !== null ||
      (selection !== null && !selection.isCollapsed && selection.containsNode(element, true));
  }

  // The tokens of forms differ in every answer and are as good as those before.
  const textOf = (cell) => cell.innerHTML.replace(/name="csrfmiddlewaretoken" value="[^"]*"/g, "");

  function replaceCells(old, fresh) {
    const before = [...old.querySelectorAll("th, td")];
    const after = [...fresh.querySelectorAll("th, td")];
    if (before.length !== after.length) {
      if (!inUse(old)) old.replaceWith(fresh);
      return;
    }
    before.forEach((cell, number) => {
      if (textOf(cell) === textOf(after[number]) || inUse(cell)) return;
      cell.replaceWith(after[number]);
    });
  }

  function show(html) {
    const answer = document.createElement("template");
    answer.innerHTML = `<table>${html}</table>`;
    const fresh = [...answer.content.querySelectorAll("tbody, tfoot")];
    const known = new Map([...table.querySelectorAll("tbody, tfoot")].map((body) => [body.dataset.queue ?? "", body]));
    const mayMove = !inUse(table);
    const kept = new Set();
    for (const body of fresh) {
      const key = body.dataset.queue ?? "";
      const old = known.get(key);
      kept.add(key);
      if (old === undefined) {
        table.append(body);
        continue;
      }
      replaceCells(old, body);
    }
    for (const [key, body] of known) if (!kept.has(key) && !inUse(body)) body.remove();
    if (!mayMove) return;
    const present = new Map([...table.querySelectorAll("tbody, tfoot")].map((body) => [body.dataset.queue ?? "", body]));
    const order = fresh.map((body) => present.get(body.dataset.queue ?? "")).filter(Boolean);
    const moved = order.some((body, place) => table.children[place + 1] !== body);
    if (moved) table.append(...order);
  }

  function report(text, isError) {
    if (shown.get(status) !== text) status.textContent = text;
    shown.set(status, text);
    status.classList.toggle("queueapp-problem", isError);
  }

  async function refresh() {
    clearTimeout(timer);
    if (document.hidden) return; // visibilitychange starts it again
    try {
      const headers = { [table.dataset.partHeader]: "rows" };
      const response = await fetch(location.href, { headers, signal: AbortSignal.timeout(LIMIT_MS) });
      if (!response.ok || response.redirected) throw new Error(`status ${response.status}`);
      show(await response.text());
      last = Date.now();
      report("Refreshed every 5 seconds.", false);
    } catch {
      const seconds = Math.round((Date.now() - last) / 1000);
      report(`Not refreshed for ${seconds} s: the site does not answer, or the session has ended.`, true);
    }
    timer = setTimeout(refresh, EVERY_MS);
  }

  document.addEventListener("visibilitychange", refresh);
  report("Refreshed every 5 seconds.", false);
  timer = setTimeout(refresh, EVERY_MS);
})();
