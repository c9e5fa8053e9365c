// Keeps the page of an operation fresh: reads it again every two seconds while it is visible and the operation has not
// ended, and replaces the part that shows it. A part with the focus stays as it is.
"use strict";

(() => {
  const EVERY_MS = 2000;

  async function refresh() {
    const shown = document.getElementById("queueapp-live");
    if (shown.dataset.live !== "yes") return;
    if (!document.hidden && !shown.contains(document.activeElement)) {
      try {
        const response = await fetch(location.href, { signal: AbortSignal.timeout(10000) });
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        const fresh = page.getElementById("queueapp-live");
        if (response.ok && fresh !== null) shown.replaceWith(fresh);
      } catch {
        // The next time may succeed; the page says how old its figures are.
      }
    }
    setTimeout(refresh, EVERY_MS);
  }

  setTimeout(refresh, EVERY_MS);
})();
