// Keeps the page fresh: asks for the numbers every two seconds and puts what the server drew into its places.
// Without it the page shows what was true when it was loaded.
"use strict";

(() => {
  const EVERY_MS = 2000;
  const LIMIT_MS = 10000;
  const places = document.querySelectorAll("[data-live]");
  const freshness = document.querySelector("[data-freshness]");
  const shown = new Map();
  let timer = 0;

  function show(answer) {
    for (const place of places) {
      const html = answer.html[place.dataset.live];
      // Replacing what did not change would take the pointer's tooltip and the keyboard's focus away.
      if (html === undefined || shown.get(place) === html || place.contains(document.activeElement)) continue;
      place.innerHTML = html;
      shown.set(place, html);
    }
    for (const empty of document.querySelectorAll("[data-empty]")) {
      empty.hidden = answer.figures[empty.dataset.empty].length > 0;
    }
  }

  function say(text, isError) {
    if (freshness.textContent !== text) freshness.textContent = text;
    freshness.classList.toggle("error", isError);
  }

  async function refresh() {
    clearTimeout(timer);
    if (document.hidden) return; // visibilitychange starts it again
    try {
      const response = await fetch(document.body.dataset.liveUrl, { signal: AbortSignal.timeout(LIMIT_MS) });
      if (!response.ok) throw new Error(`status ${response.status}`);
      show(await response.json());
      say("Live: looks again every 2 seconds.", false);
    } catch (error) {
      say(`The site does not answer (${error.message}); trying again. What you see is what it said last.`, true);
    }
    timer = setTimeout(refresh, EVERY_MS);
  }

  document.addEventListener("visibilitychange", refresh);
  refresh();
})();
