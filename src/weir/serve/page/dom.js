// Create elements. Text is always inserted as text, so a message never becomes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, and children that are elements or texts. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** A number with its thousands apart. */
export const count = (n) => n.toLocaleString("en");

/** Bytes as people read them. */
export function bytes(n) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) {
    n /= 1000;
    unit += 1;
  }
  return `${unit && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

/** How long ago something was, in seconds since 1970. */
export function ago(then) {
  const seconds = Math.max(0, Date.now() / 1000 - then);
  if (seconds < 60) return "now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(then * 1000).toLocaleDateString();
}

/** "1 turn", "2 turns". */
export const several = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

/**
 * Keep a scrolling box at its end, unless the user has scrolled away from it.
 * A box that was hidden is shown at its current end.
 */
export function endOf(box, margin) {
  let low = true;
  let last = 0;
  const settle = () => {
    if (!box.clientHeight) last = 0; // hidden; where a browser puts it afterwards is no user's doing
    else if (low) box.scrollTop = box.scrollHeight;
  };
  box.addEventListener("scroll", () => {
    if (!box.clientHeight) return;
    if (box.scrollHeight - box.scrollTop - box.clientHeight < margin) low = true;
    else if (box.scrollTop < last) low = false;
    last = box.scrollTop;
  });
  new ResizeObserver(settle).observe(box);
  return {
    settle,
    go() {
      low = true;
      settle();
    },
  };
}
