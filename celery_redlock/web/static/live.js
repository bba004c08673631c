// Fetches this page again, every few seconds, and puts its fresh part in the place of the old one.
"use strict";
(() => {
  const seconds = Number(document.documentElement.dataset.live);
  const late = document.createElement("p");
  late.className = "banner bad";
  late.setAttribute("role", "alert");
  late.textContent = "The dashboard does not answer: what you see is getting old.";

  const again = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
        const text = await answer.text();
        const page = new DOMParser().parseFromString(text, "text/html");
        const fresh = page.getElementById("live");
        const old = document.getElementById("live");
        if (!answer.ok || answer.redirected || !fresh) throw new Error(String(answer.status));
        const at = old.contains(document.activeElement) && document.activeElement.href;
        old.replaceWith(document.adoptNode(fresh));
        const alert = document.getElementById("alert");
        alert.replaceWith(document.adoptNode(page.getElementById("alert")));
        if (at) [...fresh.querySelectorAll("a")].find((a) => a.href === at)?.focus();
        late.remove();
      } catch {
        document.getElementById("live").before(late);
      }
    }
    setTimeout(again, seconds * 1000);
  };
  setTimeout(again, seconds * 1000);
})();
