// Measures the page in each frame: sections, what sticks out, the contrast of all text that shows, text on text.
function luminance([r, g, b]) {
  const part = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
}
function parse(color) {
  const found = (color || "").match(/[\d.]+/g);
  if (!found || color === "none" || color === "transparent") return [0, 0, 0, 0];
  return found.length < 4 ? [...found.slice(0, 3).map(Number), 1] : found.slice(0, 4).map(Number);
}
function over([r, g, b, a], [x, y, z]) {
  return [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a)];
}
function ground(view, element) {
  if (view.getComputedStyle(element).opacity === "0") return [0, 0, 0, 0];
  const style = view.getComputedStyle(element);
  const shape = element instanceof view.SVGElement && !["svg", "g", "text"].includes(element.tagName);
  return parse(shape ? style.fill : style.backgroundColor);
}
function contrast(view, element, x, y) {
  const stack = view.document.elementsFromPoint(x, y);
  if (!stack.includes(element)) return null; // scrolled out of its frame
  let below = [255, 255, 255];
  for (const one of stack.reverse()) if (one !== element) below = over(ground(view, one), below);
  const style = view.getComputedStyle(element);
  const ink = luminance(over(parse(element instanceof view.SVGElement ? style.fill : style.color), below));
  const paper = luminance(below);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}
function shows(view, element) {
  return element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
}
function texts(view) {
  const walker = view.document.createTreeWalker(view.document.body, view.NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.tagName === "title" || !shows(view, element)) continue;
    const range = view.document.createRange();
    range.selectNodeContents(walker.currentNode);
    const area = range.getClientRects()[0];
    if (area && area.width) found.push({ element, area, text: walker.currentNode.textContent.slice(0, 40) });
  }
  return found;
}
function collisions(found) {
  const written = found.filter(({ element }) => element.tagName === "text");
  const met = [];
  written.forEach((one, i) => {
    for (const other of written.slice(i + 1)) {
      const wide = Math.min(one.area.right, other.area.right) - Math.max(one.area.left, other.area.left);
      const tall = Math.min(one.area.bottom, other.area.bottom) - Math.max(one.area.top, other.area.top);
      if (wide > 1 && tall > 4 && one.element.ownerSVGElement === other.element.ownerSVGElement)
        met.push(`${one.text} / ${other.text}`);
    }
  });
  return met;
}
function outside(found) {
  return found
    .filter(({ element }) => element.tagName === "text")
    .filter(({ element, area }) => {
      const frame = element.ownerSVGElement.getBoundingClientRect();
      return area.left < frame.left - 1 || area.right > frame.right + 1;
    })
    .map(({ text }) => text);
}
function measure(frame) {
  const view = frame.contentWindow;
  const page = view.document;
  page.querySelectorAll("details").forEach((one) => (one.open = true));
  const found = texts(view);
  const drawn = [...page.querySelectorAll("svg")].filter((one) => shows(view, one));
  const ratios = found
    .map(({ element, area, text }) => [
      contrast(view, element, (area.left + area.right) / 2, (area.top + area.bottom) / 2), text])
    .filter(([ratio]) => ratio !== null);
  return {
    title: page.title,
    width: view.innerWidth,
    scrolls: page.documentElement.scrollWidth,
    ground: view.getComputedStyle(page.body).backgroundColor,
    sections: [...page.querySelectorAll("section")].map((one) => [one.id, one.offsetWidth, one.offsetHeight]),
    pictures: drawn.map((one) => one.getBoundingClientRect().height),
    cut: drawn.map((one) => one.parentElement).filter((one) => one.scrollWidth > one.clientWidth).length,
    texts: ratios.length,
    faint: ratios.filter(([ratio]) => ratio < 4.5).map(([ratio, text]) => `${ratio.toFixed(2)}: ${text}`),
    collisions: collisions(found),
    outside: outside(found),
  };
}
window.addEventListener("load", () => {
  const told = {};
  for (const frame of document.querySelectorAll("iframe")) told[frame.name] = measure(frame);
  document.getElementById("told").textContent = JSON.stringify(told);
});
