// The list of conversations.

import { ago, byId, el, several } from "./dom.js";

/** Show all sessions, the last used first. Calls `open` or `remove` with the chosen one. */
export function showSessions(sessions, now, { open, remove }) {
  const focused = document.activeElement?.dataset?.session;
  byId("no-sessions").hidden = sessions.length > 0;
  byId("list").replaceChildren(
    ...sessions.map((session) => {
      const opens = el(
        "button",
        { type: "button", className: "open" },
        el("span", { className: "title", dir: "auto" }, titleOf(session)),
        el(
          "span",
          { className: "when" },
          `${several(session.turns, "turn")} · ${several(session.seen, "token")} · ${ago(session.used)}`,
        ),
      );
      opens.dataset.session = session.id;
      if (session.id === now) opens.setAttribute("aria-current", "true");
      opens.addEventListener("click", () => open(session.id));
      const deletes = el("button", {
        type: "button",
        className: "quiet delete",
        ariaLabel: `Delete ${titleOf(session)}`,
        title: "Delete",
      }, "\u00d7");
      deletes.addEventListener("click", () => remove(session));
      return el("li", {}, opens, deletes);
    }),
  );
  if (focused !== undefined) {
    document.querySelector(`[data-session="${CSS.escape(focused)}"]`)?.focus();
  }
}

export const titleOf = (session) => session.topic || session.id;
