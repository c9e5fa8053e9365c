// Searches on: each response of a search looks at a part of the tables and links to the next one. This follows the link,
// adds what was found, and shows how far the search has come, until its end or until Stop. Without this script the link
// does the same, page by page.
"use strict";

(() => {
  const LIMIT_MS = 15000;
  const progress = document.getElementById("queueapp-progress");
  const found = document.getElementById("queueapp-found");
  const unread = document.getElementById("queueapp-unread");
  const stop = document.getElementById("queueapp-stop");
  const further = () => document.getElementById("queueapp-further");
  let stopped = false;

  function add(page) {
    for (const part of page.querySelectorAll("#queueapp-found > [data-place]")) {
      const name = part.dataset.place;
      const shown = [...found.children].find((place) => place.dataset.place === name);
      if (shown === undefined) found.append(part);
      else {
        shown.querySelector("tbody").append(...part.querySelectorAll("tbody > tr"));
        shown.append(...part.querySelectorAll(".queueapp-note"));
      }
    }
    unread.querySelector("ul").append(...page.querySelectorAll("#queueapp-unread li"));
    unread.hidden = unread.querySelector("li") === null;
    const before = document.querySelector(".queueapp-empty");
    const after = page.querySelector(".queueapp-empty");
    if (before !== null) before.remove();
    if (after !== null && found.children.length === 0) found.after(after);
  }

  async function searchOn() {
    while (further() !== null && !stopped) {
      try {
        const response = await fetch(further().href, { signal: AbortSignal.timeout(LIMIT_MS) });
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        const fresh = page.getElementById("queueapp-progress");
        if (!response.ok || fresh === null) throw new Error(`status ${response.status}`);
        if (stopped) break;
        add(page);
        progress.replaceChildren(...fresh.childNodes);
      } catch {
        progress.prepend("The search was interrupted: the site does not answer, or the session has ended. ");
        break;
      }
    }
    if (stopped) progress.prepend("Stopped. ");
    stop.parentElement.hidden = true;
    progress.setAttribute("role", "status"); // read out once, at the end
    progress.append("");
  }

  if (further() === null) return;
  stop.addEventListener("click", () => { stopped = true; });
  stop.parentElement.hidden = false;
  searchOn();
})();
