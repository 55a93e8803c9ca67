// Dialogs over the page.

import { byId } from "./dom.js";

/** A key, once the user has given one; `trouble` says what was wrong with the last. */
export function askForKey(trouble) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-trouble").hidden = trouble === null;
  byId("key-trouble").textContent = trouble ?? "";
  input.value = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    const closed = () => {
      if (!input.value) {
        dialog.showModal(); // nothing can be shown without a key
        return;
      }
      dialog.removeEventListener("close", closed);
      resolve(input.value);
      input.value = "";
    };
    dialog.addEventListener("close", closed);
  });
}

/** Whether a conversation is to be deleted. */
export function askToDelete(what) {
  const dialog = byId("delete-dialog");
  byId("delete-what").textContent = what;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
