"""Draws docs/pictures: `python docs/_site/pictures.py` writes them, tests/python/test_site.py compares.

Colors stand out on light and on dark pages; the background is the page's."""

import pathlib

GREY, BLUE, ORANGE, GREEN, RED = "#7d8590", "#2f6fd0", "#b35900", "#2a7f3f", "#b5343c"
FONT = "font-family='system-ui, sans-serif' font-size='14'"
FOLDER = pathlib.Path(__file__).resolve().parents[1] / "pictures"


class Picture:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.parts = (width, height), [f"<title>{title}</title>"]

    def box(self, x, y, w, h, fill=None, label="", dashed=False) -> None:
        """Filled, with a white label; or an outline, with a grey one."""
        look = f"fill='{fill}'" if fill else f"fill='none' stroke='{GREY}' stroke-width='1.5'"
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='3' {look}{dash}/>")
        if label:
            self.text(x + w / 2, y + h / 2 + 5, label, "#ffffff" if fill else GREY, "middle")

    def text(self, x, y, words, color=GREY, anchor="start", bold=False) -> None:
        weight = " font-weight='600'" if bold else ""
        self.parts.append(f"<text x='{x:g}' y='{y:g}' fill='{color}' text-anchor='{anchor}' {FONT}{weight}>{words}</text>")

    def arrow(self, x1, y1, x2, y2, color=GREY, dashed=False) -> None:
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(f"<path d='M{x1} {y1}L{x2} {y2}' stroke='{color}' stroke-width='1.8' fill='none'"
                          f" marker-end='url(#tip)'{dash}/>")

    def svg(self) -> str:
        w, h = self.size
        tip = ("<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7'"
               f" orient='auto'><path d='M0 0L8 4L0 8z' fill='{GREY}'/></marker></defs>")
        return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {w} {h}' width='{w}' height='{h}' role='img'>\n"
                + "\n".join([tip, *self.parts]) + "\n</svg>\n")


RESIDENT = (0, 3, 6)


def memory() -> Picture:
    p = Picture(760, 250, "Host images, residents and the ring")
    p.text(10, 24, "Host memory or a file: the host image of every unit", bold=True)
    for i in range(9):
        p.box(10 + 44 * i, 38, 40, 40, GREEN if i in RESIDENT else BLUE, str(i))
    p.text(10, 140, "Device: the budget", bold=True)
    p.box(10, 152, 546, 62)
    for n, i in enumerate(RESIDENT):
        p.box(18 + 46 * n, 162, 42, 42, GREEN, str(i))
    for n, i in enumerate((4, 5, 7)):
        p.box(182 + 92 * n, 162, 80, 42, BLUE, str(i))
    p.box(458, 162, 90, 42, None, "8 comes", dashed=True)
    p.text(86, 236, "residents: loaded once", anchor="middle")
    p.text(364, 236, "ring: filled in order, reused in order", anchor="middle")
    p.box(580, 152, 170, 62, None, "activations, others", dashed=True)
    p.arrow(382, 82, 500, 156)
    p.text(462, 112, "one copy for each unit that streams,")
    p.text(462, 130, "in the order of the plan")
    return p


def time() -> Picture:
    p = Picture(760, 240, "Copies run beside compute")
    unit, left = 66, 86
    p.text(10, 62, "compute", bold=True)
    p.text(10, 122, "link", bold=True)
    for i in range(9):
        p.box(left + unit * i, 40, unit - 4, 36, GREEN if i in RESIDENT else BLUE, str(i))
    streams = [i for i in range(9) if i not in RESIDENT]
    wide = unit * 9 / 6
    for n, i in enumerate(streams[1:] + streams[:1]):
        p.box(left + wide * n, 100, wide - 4, 36, ORANGE, f"copy {i}")
    p.arrow(left + wide - 4, 136, left + 2 * unit + 4, 78, dashed=True)
    p.text(left, 166, "A copy ends before its unit computes. While residents (green) compute,")
    p.text(left, 186, "the link loads units that stream (blue). The last copy, of unit 1, is for the next step.")
    p.arrow(left, 212, left + 9 * unit, 212)
    p.text(left + 9 * unit - 4, 232, "time of one step", anchor="end")
    return p


def lease() -> Picture:
    p = Picture(760, 210, "A lease and the refill of its place")
    left = 130
    for y, name in ((30, "host (Python)"), (84, "compute stream"), (138, "copy stream")):
        p.text(10, y + 22, name, bold=True)
    p.box(left, 30, 84, 34, GREY, "acquire")
    p.box(left + 88, 30, 96, 34, GREY, "forward")
    p.box(left + 188, 30, 84, 34, GREY, "release")
    p.text(left + 286, 52, "the host goes on, and waits for nothing")
    p.box(left + 88, 84, 84, 34, None, "wait", dashed=True)
    p.box(left + 176, 84, 200, 34, BLUE, "kernels of unit 4")
    p.box(left, 138, 172, 34, ORANGE, "copy unit 4")
    p.box(left + 380, 138, 190, 34, ORANGE, "copy unit 8")
    p.arrow(left + 172, 140, left + 178, 120)
    p.arrow(left + 376, 118, left + 384, 136)
    p.text(left, 198, "Units 4 and 8 share one place. Copy 8 waits for the kernels of unit 4 on the device.")
    return p


def training() -> Picture:
    p = Picture(760, 270, "A step of training")
    left, unit = 96, 62
    p.text(10, 60, "device", bold=True)
    for i in range(5):
        p.box(left + unit * i, 38, unit - 4, 36, BLUE, f"F{i}")
    for n, i in enumerate(reversed(range(5))):
        p.box(left + unit * (5 + n), 38, unit - 4, 36, RED, f"B{i}")
    p.text(left + unit * 2.5, 26, "forward", anchor="middle")
    p.text(left + unit * 7.5, 26, "backward", anchor="middle")
    p.text(left + unit * 5, 96, "the turn: units 3 and 4 stay in the ring", anchor="middle")
    p.text(10, 160, "link", bold=True)
    p.box(left, 130, unit * 5 - 4, 24, ORANGE, "weights of forward")
    p.box(left + unit * 6, 130, unit * 3 - 4, 24, ORANGE, "weights of backward")
    p.box(left + unit * 6, 160, unit * 4 - 4, 24, GREEN, "gradients, to the host")
    p.text(10, 228, "host", bold=True)
    p.box(left, 208, unit * 6 - 8, 32, None, "masters, optimizer state")
    p.box(left + unit * 6, 208, unit * 4 - 4, 32, GREY, "optimizer, as gradients arrive")
    p.arrow(left + unit * 8, 184, left + unit * 8, 206)
    p.text(left, 262, "A weight that trains as a whole is updated in host memory, and copied again in the next step.")
    return p


def cap() -> Picture:
    p = Picture(760, 190, "Models share one cap")
    for y, name, first, second in ((34, "the text encoder runs", 300, 90), (94, "the denoiser runs", 60, 330)):
        p.text(10, y + 26, name, bold=True)
        p.box(186, y, first, 42, BLUE, "encoder")
        p.box(190 + first, y, second, 42, GREEN, "denoiser")
        p.box(194 + first + second, y, 744 - 194 - first - second, 42, None, "activations", dashed=True)
    p.arrow(186, 160, 580, 160)
    p.text(186, 182, "cap: the free memory, or the budget of stagehand.Device")
    return p


PICTURES = {"memory": memory, "time": time, "lease": lease, "training": training, "cap": cap}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
